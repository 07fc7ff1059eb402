"""Fixtures that tests of several folders share."""

from collections.abc import Callable
from typing import Any

import jax
import pytest


@pytest.fixture(params=["jit", "eager"])
def maybe_jit(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return jax.jit if request.param == "jit" else lambda f: f


@pytest.fixture(params=["two programs", "one program"])
def kind(request: pytest.FixtureRequest) -> str:
    """How a step of `helpers.new_train_step` is compiled."""
    return request.param
