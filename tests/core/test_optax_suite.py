"""optax's own tests of `MultiSteps`, from the installed package, run on our class."""

import importlib
import itertools
import unittest
from typing import Any

import optax
import pytest
from optax.transforms import _accumulation

from optax_tokenaccum import MultiSteps

pytestmark = pytest.mark.slow

# The tests of the class, and the test of each optimizer with accumulation.
PREFIXES = {
    "optax.transforms._accumulation_test": "test_multi_steps",
    "optax._src.alias_test": "test_gradient_accumulation",
    "optax._src.factorized_test": "test_gradient_accumulation",
    "optax.contrib._common_test": "test_gradient_accumulation",
}


def _tests_of(module: str, prefix: str) -> list[Any]:
    members = vars(importlib.import_module(module)).values()
    return [
        pytest.param(case, name, id=f"{case.__name__}-{name}")
        for case in members
        if isinstance(case, type) and issubclass(case, unittest.TestCase)
        for name in unittest.TestLoader().getTestCaseNames(case)
        if name.startswith(prefix)
    ]


TESTS = {module: _tests_of(module, prefix) for module, prefix in PREFIXES.items()}

# Tests in each file; a later version may drop those of a deprecated optimizer.
COUNTS = {"0.2.7": [7, 66, 4, 42], "0.2.8": [8, 66, 4, 42]}


def test_none_is_left_out():
    counts = [len(tests) for tests in TESTS.values()]
    if optax.__version__ in COUNTS:
        assert counts == COUNTS[optax.__version__]
    assert all(counts) and sum(counts) > 100


@pytest.mark.parametrize(("case", "name"), [*itertools.chain(*TESTS.values())])
def test_of_optax(
    case: type[unittest.TestCase], name: str, monkeypatch: pytest.MonkeyPatch
):
    made = []

    class CountOfOne(MultiSteps):
        """Our class, called like optax's: every micro-batch has a count of 1."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, num_tokens=1, **kwargs)

    monkeypatch.setattr(_accumulation, "MultiSteps", CountOfOne)
    try:
        case(name).debug()  # unlike `run`, raises the test's error
    except unittest.SkipTest as skipped:
        raise AssertionError("none is to be skipped") from skipped
    assert made
