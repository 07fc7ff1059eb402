"""optax's own tests of `MultiSteps`, from the installed package, run on our class."""

import unittest
from typing import Any

import optax
import pytest
from optax.transforms import _accumulation, _accumulation_test

from optax_tokenaccum import MultiSteps, TokenAccumulationState

pytestmark = pytest.mark.slow

NAMES = [
    name
    for name in dir(_accumulation_test.AccumulationTest)
    if name.startswith("test_multi_steps")
]


def test_none_is_left_out():
    assert len(NAMES) == {"0.2.8": 8}.get(optax.__version__, len(NAMES)) > 5


@pytest.mark.parametrize("name", NAMES)
def test_of_optax(name: str, monkeypatch: pytest.MonkeyPatch):
    made = []

    class CountOfOne(MultiSteps):
        """Our class, called like optax's: every micro-batch has a count of 1."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, num_tokens=1, **kwargs)

    monkeypatch.setattr(_accumulation, "MultiSteps", CountOfOne)
    # One test reads the dtype of optax's means, where ours are sums of another name.
    sums = property(lambda state: state.grad_sums)
    monkeypatch.setattr(TokenAccumulationState, "acc_grads", sums)
    try:
        # Unlike `run`, it raises the test's error.
        _accumulation_test.AccumulationTest(name).debug()
    except unittest.SkipTest as skipped:
        raise AssertionError("none is to be skipped") from skipped
    assert made
