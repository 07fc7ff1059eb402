"""Mistakes that other projects made, one test each, named after what went wrong.

Each test also runs the wrong way, either optax's class itself or a few lines with the
arithmetic of the other system, and asserts that it is wrong. This file tests what is
summed and what it is divided by:

* one NaN micro-batch poisoned every later update (optax)
* weight decay and schedules ran per micro-batch (Keras)
* divided by k after a global count (EasyDeL)
* dropped micro-batch stayed in the denominator (prime-rl)
* grad_norm was averaged with zeros (Tunix)
* fully masked micro-batch was NaN (levanter), or one of the k means
* max(count, 1) spoiled fractional weights (MaxText)
* float32 counts stop at 2^24; for bfloat16 sums, see `test_numerics.py`
* labels were counted unshifted (transformers, unsloth-zoo)
* packing boundaries were counted (OpenNMT)

`test_scenarios_of_runs.py` tests what happens from call to call:

* has_updated was true after a skip at the start of a window (optax)
* every micro-batch drew the same dropout mask (t5x); for MaxText's mask, more of its
  arithmetic and auxiliary losses, see `test_own_your_step.py`
* window ran across an epoch boundary (OpenRLHF)
* for a partial last window that was dropped (torchtune, mlx-lm), see
  `test_token_accumulation.py`
* resume in mid-window lost micro-batches (OneTrainer)
* counters counted micro-steps (EasyLM, MaxText, Flax)

`test_scenarios_of_programs.py` tests what an optimizer accepts and compiles to:

* count lost in a chain of plain transformations (optax)
* NumPy integer k was not callable, and 0 and -1 were accepted (optax)
* dtypes did not fit in a cond (optax)
* k of 1 took the memory of accumulation (optax, EasyLM, t5x)
* Python int count retraced, first call with unplaced state compiled twice (Tunix)

Other files test mistakes on more than one device: the mean over devices of their means
(`test_many_devices.py`), gradients that are reduced twice or never under `shard_map`
(`test_axis_name.py`), and rows that move when a batch is split (`test_collectives.py`).
"""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ways_in import (
    PARAMS,
    SGD,
    WAYS,
    Batch,
    batch_of,
    exact,
    loss_fn,
    optax_multi_steps,
    program,
    update_loop,
)

from optax_tokenaccum import (
    MultiSteps,
    softmax_cross_entropy_sum,
    token_accumulation,
    window_value_and_grad,
)

RTOL = helpers.RTOL["float32"]
SKIPS = {"should_skip_update_fn": optax.skip_not_finite}

FOUR = [1.0, 1.0, 1.0, 1.0]
SHORT, LONG = batch_of(1, [1.0, 0.0, 0.0, 0.0]), batch_of(2, FOUR)
RAGGED = [SHORT, LONG]
COUNT = float(sum(batch["weights"].sum() for batch in RAGGED))
NAN = batch_of(3, FOUR) | {"y": np.full(4, np.nan, np.float32)}
# An applied NaN stays in the parameters; this optimizer blocks all NaN updates.
GUARDED = optax.apply_if_finite(SGD, 100)


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


@jax.jit
def sum_and_count(params: Any, batch: Any) -> Any:
    return jax.grad(loss_fn, has_aux=True)(params, batch)


def mean_gradient(params: Any, batch: Any) -> Any:
    gradient, n = sum_and_count(params, batch)
    return jax.tree.map(lambda g: g / n, gradient)


def sums_and_counts(window: list[Batch]) -> tuple[Any, float]:
    """Add up the finite gradients, and the tokens of all micro-batches."""
    gradients, counts = zip(*(sum_and_count(PARAMS, b) for b in window), strict=True)
    sums = jax.tree.map(lambda *gs: sum(map(jnp.nan_to_num, gs)), *gradients)
    return sums, float(sum(counts))


def moved(params: Any, after: Any) -> Any:
    return helpers.difference(params, after)


def assert_exact(params: Any, after: Any, *batches: Batch) -> None:
    error = helpers.relative_error(moved(params, after), exact(params, *batches))
    assert error < RTOL, error


def test_one_nan_micro_batch_poisoned_every_later_update(way: Any):
    """optax 0.2.8 resets the sums by multiplying them by 0."""
    windows = [[NAN, LONG], [SHORT, LONG], [LONG, SHORT]]
    theirs = optax_multi_steps(GUARDED)(PARAMS, windows)
    chex.assert_trees_all_equal(theirs[-1], PARAMS)
    first, second, third = way(loss_fn, GUARDED, 2)(PARAMS, windows)
    chex.assert_trees_all_equal(first, PARAMS)
    assert_exact(first, second, SHORT, LONG)
    assert_exact(second, third, LONG, SHORT)
    (unguarded,) = program(way)(PARAMS, [[NAN, LONG]])
    assert np.isnan(unguarded["w"]).all()  # without a guard, the NaN shows


def test_weight_decay_and_schedules_ran_per_micro_batch(way: Any):
    """Keras on JAX runs the whole optimizer on every micro-step and masks gradients."""
    decay, rates = 0.125, np.array([0.25, 0.0625, 1.0, 1.0])
    inner = optax.chain(
        optax.add_decayed_weights(decay),
        optax.sgd(lambda step: jnp.asarray(rates, jnp.float32)[step]),
    )
    windows = [[SHORT, LONG], [LONG, SHORT]]
    theirs, state = PARAMS, inner.init(PARAMS)
    expected = jax.tree.map(lambda w: np.asarray(w, np.float64), PARAMS)
    for rate, window in zip(rates, windows, strict=False):
        for gradient in ({"w": np.zeros(4)}, exact(theirs, *window)):
            gradient = jax.tree.map(jnp.float32, gradient)
            updates, state = inner.update(gradient, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        gradient = exact(expected, *window)["w"] + decay * expected["w"]
        expected = {"w": expected["w"] - rate * gradient}
    assert helpers.relative_error(theirs, expected) > 0.01
    ours = way(loss_fn, inner, 2)(PARAMS, windows)[-1]
    assert helpers.relative_error(ours, expected) < RTOL


def test_divided_by_k_after_a_global_count(way: Any):
    """EasyDeL, GRPO: divides losses by the window's tokens, then takes their mean."""
    (theirs,) = optax_multi_steps(divisor=COUNT)(PARAMS, [RAGGED])
    twice = jax.tree.map(lambda g: g / len(RAGGED), exact(PARAMS, *RAGGED))
    assert helpers.relative_error(moved(PARAMS, theirs), twice) < RTOL
    (ours,) = program(way)(PARAMS, [RAGGED])
    assert_exact(PARAMS, ours, *RAGGED)


def test_sums_that_a_global_count_divided_are_only_added():
    """A loop that divides by its global count can instead keep that count."""
    optimizer = MultiSteps(SGD, 2, use_grad_mean=False)

    def shared(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[0] / COUNT, 1

    (ours,) = update_loop(optimizer, shared)(PARAMS, [RAGGED])
    assert_exact(PARAMS, ours, *RAGGED)


def test_dropped_micro_batch_stayed_in_the_denominator(way: Any):
    """prime-rl drops a non-finite gradient but counts its tokens."""
    window = [SHORT, NAN, LONG]
    sums, count = sums_and_counts(window)
    theirs = jax.tree.map(lambda g: g / count, sums)
    assert helpers.relative_error(theirs, exact(PARAMS, SHORT, LONG)) > 0.01
    (ours,) = program(way, **SKIPS)(PARAMS, [window])
    assert_exact(PARAMS, ours, SHORT, LONG)


def test_grad_norm_was_averaged_with_zeros(kind: str):
    """Tunix averages the reports of open windows into the mean that it logs."""
    step = helpers.new_train_step(kind, loss_fn, SGD, 2)
    state, logged = step.init(PARAMS), []
    for batch in RAGGED:
        state, metrics = step(state, batch)
        logged.append((float(metrics.grad_norm), bool(metrics.updated)))
    norm = np.linalg.norm(exact(PARAMS, *RAGGED)["w"])
    theirs = np.mean([norm for norm, _ in logged])
    np.testing.assert_allclose(theirs, norm / len(RAGGED), rtol=RTOL)
    ours = np.mean([norm for norm, updated in logged if updated])
    np.testing.assert_allclose(ours, norm, rtol=RTOL)


def test_fully_masked_micro_batch_was_nan(way: Any):
    """levanter takes a mean over nothing; with max(count, 1) it is one of k means."""
    window = [batch_of(4, [0.0] * 4), LONG]
    (theirs,) = optax_multi_steps()(PARAMS, [window])
    assert np.isnan(theirs["w"]).all()
    means = [mean_gradient(PARAMS, batch) for batch in window]
    guarded = jax.tree.map(lambda *gs: sum(map(jnp.nan_to_num, gs)) / 2, *means)
    assert helpers.relative_error(guarded, exact(PARAMS, LONG)) > 0.01
    (ours,) = program(way)(PARAMS, [window])
    assert_exact(PARAMS, ours, LONG)


def test_max_count_1_spoiled_fractional_weights(way: Any):
    """MaxText divides weights that sum to less than 1 by 1."""
    window = [batch_of(1, [0.125, 0.0, 0.0, 0.0]), batch_of(2, [0.0625] * 4)]
    sums, count = sums_and_counts(window)
    theirs = jax.tree.map(lambda g: g / max(count, 1), sums)
    assert helpers.relative_error(theirs, exact(PARAMS, *window)) > 0.01
    (ours,) = program(way)(PARAMS, [window])
    assert_exact(PARAMS, ours, *window)


def test_float32_counts_stop_at_2_to_the_24():
    """One-by-one token counts stop growing; counts per micro-batch round by 1e-7."""
    counts = np.array([2**24, 1, 1, 1, 2**18 + 1, 2**18 + 3])
    scales = np.array([0.5, -1.0, 2.0, 1.5, 1.0, -0.25])
    more = int(counts[1:].sum())
    theirs = jax.lax.fori_loop(0, more, lambda _, n: n + 1, jnp.float32(2**24))
    assert float(theirs) == 2**24 < 0.98 * counts.sum()
    optimizer = token_accumulation(SGD, len(counts))
    update, params = jax.jit(optimizer.update), jnp.zeros(())
    state = optimizer.init(params)
    for n, scale in zip(counts, scales, strict=True):
        gradient = jnp.float32(n * scale)
        updates, state = update(gradient, state, params, num_tokens=int(n))
    expected = (counts * scales).sum() / counts.sum()
    np.testing.assert_allclose(-updates, expected, rtol=RTOL)


def assert_counts_what_bears_loss(batch: Batch, mask: Any, counted: int) -> None:
    """Check that `mask` is exact, and that the same sum over `counted` is not."""

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = helpers.logits_of(params, batch["tokens"])
        return softmax_cross_entropy_sum(logits, batch["labels"], ignore_index=-100)

    labels = np.where(mask, batch["labels"], -100)
    micro_batches = helpers.cut({"tokens": batch["tokens"], "labels": labels}, 4)
    window = helpers.stack(micro_batches)
    params = helpers.init_params(0)
    f = jax.jit(window_value_and_grad(loss_fn))
    (_, (num_tokens, _)), ours = f(params, window)
    assert float(num_tokens) == mask.sum() != counted
    expected = helpers.float64_gradient(params, batch | {"mask": mask})
    assert helpers.relative_error(ours, expected) < RTOL
    theirs = jax.tree.map(lambda g: g * num_tokens / counted, ours)
    assert helpers.relative_error(theirs, expected) > 0.01


def test_labels_were_counted_unshifted():
    """transformers 46204, unsloth-zoo 1066: one token too many per row."""
    batch = helpers.ragged_batch(0, rows=8)
    mask = batch["mask"]
    unshifted = np.concatenate([np.ones((len(mask), 1), bool), mask], axis=1)
    assert_counts_what_bears_loss(batch, mask, unshifted.sum())


def test_packing_boundaries_were_counted():
    """OpenNMT: the last token of a text does not predict the first of the next one."""
    batch = helpers.ragged_batch(0, rows=8)
    text = np.arange(helpers.MAX_LENGTH + 1) // 8
    mask = batch["mask"] & (text[1:] == text[:-1])
    assert_counts_what_bears_loss(batch, mask, batch["mask"].sum())
