"""A planned window: the full batch's gradient, and one program for every plan."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ragged_windows import CUT, PADS, planned, ragged_window

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum.ragged import PlannedWindow, pad_window

PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}
SGD = optax.sgd(1.0, momentum=0.0)
TRAIN_STEP, WINDOW_STEP = (
    make(helpers.loss_sum_fn, SGD) for make in (make_train_step, make_window_step)
)
value_and_gradient = jax.jit(window_value_and_grad(helpers.loss_sum_fn))
mean_gradient = jax.jit(jax.grad(helpers.loss_mean_fn, has_aux=True))


def by_window_value_and_grad(params: Any, sequences: list[Any]) -> Any:
    window = pad_window(sequences, pad_values=PADS, **CUT)
    (_, (num_tokens, _)), gradient = value_and_gradient(params, window)
    return gradient, num_tokens


def by_window_step(params: Any, sequences: list[Any]) -> Any:
    window = pad_window(sequences, pad_values=PADS, **CUT)
    state, metrics = WINDOW_STEP(WINDOW_STEP.init(params), window)
    return optax.tree.get(state.opt_state, "trace"), metrics.num_tokens


def by_train_step(params: Any, sequences: list[Any]) -> Any:
    state = TRAIN_STEP.init(params)
    for batch in planned(sequences):
        state, _ = TRAIN_STEP.accumulate(state, batch)
    state, metrics = TRAIN_STEP.close_window(state)
    return optax.tree.get(state.opt_state, "trace"), metrics.num_tokens


def test_gradient_is_that_of_the_full_batch_and_the_naive_one_is_not():
    params = helpers.init_params(0)
    batch, sequences = ragged_window(0)
    reference = helpers.float64_gradient(params, batch)
    for way in (by_window_value_and_grad, by_window_step, by_train_step):
        gradient, num_tokens = way(params, sequences)
        assert helpers.relative_error(gradient, reference) < helpers.RTOL["float32"]
        assert float(num_tokens) == batch["mask"].sum()
    micro_batches = planned(sequences)
    assert len({batch["mask"].shape for batch in micro_batches}) > 1
    means = [mean_gradient(params, batch)[0] for batch in micro_batches]
    naive = jax.tree.map(lambda *gs: sum(gs) / len(gs), *means)
    assert helpers.relative_error(naive, reference) > 0.01


def test_labels_that_are_ignored_weigh_nothing_and_zeros_would():
    def loss_fn(params: Any, batch: Any) -> Any:
        return helpers.softmax_cross_entropy_sum(
            helpers.logits_of(params, batch["tokens"]),
            batch["labels"],
            ignore_index=-100,
        )

    params = helpers.init_params(0)
    batch, sequences = ragged_window(0)
    for sequence in sequences:
        sequence["labels"] = np.where(sequence["mask"], sequence["labels"], -100)
        del sequence["mask"]
    reference = helpers.float64_gradient(params, batch)
    value_and_grad = jax.jit(window_value_and_grad(loss_fn))
    errors = {}
    for pad in (-100, 0):
        window = pad_window(sequences, pad_values={"tokens": 0, "labels": pad}, **CUT)
        (_, (num_tokens, _)), gradient = value_and_grad(params, window)
        errors[pad] = helpers.relative_error(gradient, reference)
        assert (float(num_tokens) == batch["mask"].sum()) == (pad == -100)
    assert errors[-100] < helpers.RTOL["float32"]
    assert errors[0] > 0.01


@pytest.mark.slow
def test_a_number_for_each_sequence_is_a_row_of_its_own():
    """Sequences are weighted by a scalar leaf; missing rows would have weight 1."""

    def loss_fn(params: Any, batch: Any) -> Any:
        weights = jnp.where(batch["mask"], batch["weight"][:, None], 0)
        return helpers.softmax_cross_entropy_sum(
            helpers.logits_of(params, batch["tokens"]), batch["labels"], weights
        )

    params = helpers.init_params(1)
    batch, sequences = ragged_window(1)
    weights = np.random.default_rng(1).choice([0.5, 1.0, 4.0], helpers.ROWS)
    for sequence, weight in zip(sequences, weights, strict=True):
        sequence["weight"] = weight
    pads = PADS | {"weight": 1}
    batch |= {"weight": weights.astype(np.float32)}
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (_, total), expected = value_and_grad(params, batch)
    expected = jax.tree.map(lambda g: g / total, expected)
    window = pad_window(sequences, pad_values=pads, **CUT)
    gradient = jax.jit(window_value_and_grad(loss_fn))(params, window)[1]
    assert helpers.relative_error(gradient, expected) < helpers.RTOL["float32"]
    unweighted, _ = by_window_value_and_grad(params, ragged_window(1)[1])
    assert helpers.relative_error(unweighted, expected) > 0.01


def small_window() -> tuple[list[Any], PlannedWindow]:
    sequences = [{"x": np.full(n, float(n)), "n": np.ones(n)} for n in (1, 4, 2, 3, 1)]
    return sequences, pad_window(
        sequences, pad_values=0, max_tokens=4, length_buckets=[1, 2, 4]
    )


def sum_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch["x"]), jnp.sum(batch["n"])


def test_aux_is_by_the_index_in_the_window():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = sum_fn(params, batch)
        return loss_sum, (n, jnp.asarray(batch["x"].shape))

    _, window = small_window()
    assert window.counts.tolist() == [2, 1, 1] and window.capacity == 5
    f = jax.jit(window_value_and_grad(loss_fn, has_aux=True))
    (loss, (num_tokens, shapes)), _ = f(PARAMS, window)
    np.testing.assert_allclose(loss, -(1 + 16 + 4 + 9 + 1) / 11, rtol=1e-6)
    assert float(num_tokens) == 11
    assert shapes.tolist() == [[1, 4], [1, 4], [2, 2], [4, 1], [0, 0]]


def test_aux_that_depends_on_the_length_is_an_error():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = sum_fn(params, batch)
        return loss_sum, (n, {"losses": batch["x"]})

    _, window = small_window()
    f = window_value_and_grad(loss_fn, has_aux=True)
    message = (
        r"aux must have the same shapes in micro-batches of every length.*"
        r"at \['losses'\] expected shape \(1, 4\), got shape \(2, 2\)"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(f, PARAMS, window)


def test_each_loss_has_its_own_denominator():
    def loss_fn(params: Any, batch: Any) -> Any:
        w = jnp.sum(params["w"])
        real = batch["n"].any(1)
        return {
            "tokens": w * jnp.sum(batch["x"]),
            "rows": w**2 * jnp.sum(real),
            "constant": w * jnp.sum(batch["n"]) / 64,
        }

    def count_fn(batch: Any) -> Any:
        rows = jnp.sum(batch["n"].any(1))
        return {"tokens": jnp.sum(batch["n"]), "rows": rows, "constant": None}

    _, window = small_window()
    step = make_window_step(loss_fn, optax.sgd(1.0), count_fn=count_fn)
    state, metrics = step(step.init(PARAMS), window)
    assert {name: n and float(n) for name, n in metrics.num_tokens.items()} == {
        "tokens": 11.0,
        "rows": 5.0,
        "constant": None,
    }
    gradient = 31 / 11 + 2 * -1 + 11 / 64
    np.testing.assert_allclose(PARAMS["w"] - state.params["w"], gradient, rtol=1e-6)


def test_a_rejected_micro_batch_never_happened():
    sequences, _ = small_window()
    sequences[1]["x"][2] = np.nan
    window = pad_window(sequences, pad_values=0, max_tokens=4, length_buckets=[1, 4])
    step = make_window_step(sum_fn, optax.sgd(1.0), **helpers.SKIPS)
    state, metrics = step(step.init(PARAMS), window)
    assert bool(metrics.skipped) and float(metrics.num_tokens) == 11 - 4
    np.testing.assert_allclose(
        PARAMS["w"] - state.params["w"], (31 - 16) / 7, rtol=1e-6
    )


def test_no_shape_costs_a_copy_of_the_sums():
    def loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"][..., None] @ params["a"]) @ params["b"]
        return jnp.sum(x**2), jnp.sum(batch["n"])

    width = 256
    params = {"a": jnp.ones((1, width)), "b": jnp.ones((width, width))}
    sequences, _ = small_window()

    def temporaries(buckets: list[int]) -> int:
        window = pad_window(
            sequences, pad_values=0, max_tokens=4, length_buckets=buckets
        )
        step = make_window_step(loss_fn, optax.sgd(0.1))
        compiled = step.lower(step.init(params), window).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    gradient_bytes = 4 * width**2
    assert temporaries([1, 2, 3, 4]) - temporaries([4]) < gradient_bytes / 4
