"""Gives every test Keras's JAX backend, 8 devices, and fast compilation."""

import os

import xla_flags

os.environ["KERAS_BACKEND"] = "jax"
xla_flags.set_flags()
