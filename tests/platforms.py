"""Where tests run: on a CPU as 8 devices, or where `JAX_PLATFORMS` says."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import pytest


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """The variables to set, next to those of an environment that are given."""
    platforms = given.get("JAX_PLATFORMS") or "cpu"
    chosen = {"JAX_PLATFORMS": platforms}
    if platforms.split(",")[0] != "cpu":
        # Otherwise each worker takes most of a GPU's memory, and float32 products are
        # rounded to TF32.
        chosen["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        chosen["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        return chosen | {x: given[x] for x in chosen if given.get(x)}
    flags: dict[str, Any] = {"xla_force_host_platform_device_count": 8}
    # Tests spend most of their time compiling, and few depend on how fast a program
    # runs. Every supported jax knows these flags; an unknown one would end the process.
    if not given.get("COMPILE_AS_USERS"):
        flags |= {
            "xla_backend_optimization_level": 0,
            "xla_cpu_parallel_codegen_split_count": 1,
            "xla_llvm_disable_expensive_passes": True,
        }
        if jax.__version_info__ < (0, 11):  # less time; not in newer jax
            flags["xla_cpu_use_fusion_emitters"] = False
    old = given.get("XLA_FLAGS", "")
    added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in old]
    # Otherwise 8 devices on 2 cores may deadlock.
    nproc = given.get("NPROC", "32")
    return chosen | {"XLA_FLAGS": " ".join([old, *added]), "NPROC": nproc}


def choose() -> None:
    """Applies the settings; must run before jax starts its backend."""
    chosen = settings(os.environ)
    os.environ |= chosen  # for workers and other processes, too
    for name in chosen:
        if name.startswith("JAX_"):  # jax has read its variables
            jax.config.update(name.lower(), chosen[name])


def reason_to_skip(
    platform: str, count: int, *, cpu: str = "", devices: int = 1
) -> str | None:
    """Why a test cannot run on `count` devices of a platform, if it cannot.

    Args:
      platform: as `jax.default_backend()` returns it.
      count: how many devices there are.
      cpu: why the test needs a CPU, if it does.
      devices: how many it needs.
    """
    if cpu and platform != "cpu":
        return f"needs a CPU: {cpu}"
    if count < devices:
        return f"needs {devices} devices, not {count} of {platform}"
    return None


def require(**needs: Any) -> None:
    """Skips the test that calls this if it cannot run; see `reason_to_skip`."""
    if why := reason_to_skip(jax.default_backend(), jax.device_count(), **needs):
        pytest.skip(why)
