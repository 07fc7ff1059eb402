"""Gives every test Keras's JAX backend, 8 devices, and fast compilation."""

import os

import platforms

os.environ["KERAS_BACKEND"] = "jax"
platforms.choose()
