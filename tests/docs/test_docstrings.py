"""What the docstring of every public name must contain."""

import pytest

import optax_tokenaccum
import optax_tokenaccum.grain
import optax_tokenaccum.linen
import optax_tokenaccum.microbatching
import optax_tokenaccum.nnx

PUBLIC = [
    *(getattr(optax_tokenaccum, name) for name in optax_tokenaccum.__all__),
    optax_tokenaccum.grain.PlannedMicroBatch,
    optax_tokenaccum.grain.planned_micro_batches,
    optax_tokenaccum.linen.TrainState,
    optax_tokenaccum.microbatching.token_mean,
    optax_tokenaccum.nnx.TrainStep,
    optax_tokenaccum.nnx.WindowStep,
    optax_tokenaccum.nnx.make_train_step,
    optax_tokenaccum.nnx.make_window_step,
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda x: f"{x.__module__}.{x.__name__}")
def test_an_example_that_the_suite_runs(public: object):
    assert "\n      >>> " in (public.__doc__ or "")
