"""XLA's flags for tests: 8 devices on any number of cores, and fast compilation."""

import os

import jax


def set_flags() -> None:
    """Adds the flags that are not given, before jax starts its backend."""
    flags = {"xla_force_host_platform_device_count": 8}
    # Tests spend most of their time compiling, and few depend on how fast a program
    # runs. Every supported jax knows these flags; an unknown one would end the process.
    if not os.environ.get("COMPILE_AS_USERS"):
        flags |= {
            "xla_backend_optimization_level": 0,
            "xla_cpu_parallel_codegen_split_count": 1,
            "xla_llvm_disable_expensive_passes": True,
        }
        if jax.__version_info__ < (0, 11):  # halves compile time; not in newer jax
            flags["xla_cpu_use_fusion_emitters"] = False
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added])
    os.environ.setdefault("NPROC", "32")  # otherwise 8 devices on 2 cores may deadlock
