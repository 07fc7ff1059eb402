"""Every test sees 8 devices on however few cores, and compiles quickly, not well."""

import os

collect_ignore = ["docs/conf.py"]  # of Sphinx, which the tests do without

flags = {"xla_force_host_platform_device_count": 8}
# Compiling is most of what tests cost, and hardly one depends on how fast a program is.
# Every supported jax knows these flags: an unknown one would end the process.
if not os.environ.get("COMPILE_AS_USERS"):
    flags |= {
        "xla_backend_optimization_level": 0,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_llvm_disable_expensive_passes": True,
    }
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added])
os.environ.setdefault("NPROC", "32")  # without which 8 devices on 2 cores may deadlock
