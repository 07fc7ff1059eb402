"""Chips that programs are compiled for, without having one."""

import importlib.metadata
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

ENVIRONMENT = {
    # Otherwise one process at a time may compile for a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Otherwise libtpu asks the network what machine this is.
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Otherwise jax drops the plugin where the driver is missing.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Autotuning runs kernels.
XLA_FLAG = "--xla_gpu_autotune_level=0"


class Chip(NamedTuple):
    """What jax needs to compile for eight chips of a kind."""

    packages: tuple[str, ...]
    topology: dict[str, Any]  # the arguments of `get_topology_desc`

    def missing(self) -> list[str]:
        """What to install, with versions where they must be those of jax."""
        return [name for name in self.packages if _version(name.split("==")[0]) is None]

    def version(self) -> str:
        """The name and the version of the first package."""
        name = self.packages[0].split("==")[0]
        return f"{name} {_version(name)}"

    def devices(self) -> np.ndarray:
        """Eight chips, for which programs then compile."""
        prepare()
        return np.array(topologies.get_topology_desc(**self.topology).devices)


def prepare() -> None:
    """Must run before jax starts its backends, if it is to compile for GPUs."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    flags = os.environ.get("XLA_FLAGS", "")
    if XLA_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {XLA_FLAG}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# A GpuTargetConfigProto.
H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 patch: 0 } platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""

CHIPS = {
    "v5e": Chip(("libtpu",), {"platform": "tpu", "topology_name": "v5e:2x4"}),
    "H200": Chip(
        (
            f"jax-cuda12-plugin=={jax.__version__}",
            f"jax-cuda12-pjrt=={jax.__version__}",
            "nvidia-cuda-nvcc-cu12",
            "nvidia-nvjitlink-cu12",
        ),
        dict(
            platform="cuda",
            topology_name="h200",
            target_config=H200,
            topology="1x1x8",
        ),
    ),
}
