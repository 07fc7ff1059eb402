"""Gives every test Keras's JAX backend, 8 devices, and fast compilation."""

import os

import jax

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("NPROC", "32")  # otherwise 8 devices on 2 cores may deadlock
flags = {
    "xla_force_host_platform_device_count": 8,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # halves compile time; not in newer jax
    flags["xla_cpu_use_fusion_emitters"] = False
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added])
