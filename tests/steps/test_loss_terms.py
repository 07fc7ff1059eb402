"""Several losses with different denominators in one window."""

import operator
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_window_step, window_value_and_grad

BALANCE, PENALTY = 0.3, 0.05


def terms_fn(params: Any, batch: Any) -> dict[str, jax.Array]:
    """Terms per token, per sequence, per micro-batch, and divided by a constant."""
    token_sum, _ = helpers.loss_sum_fn(params, batch)
    logits = helpers.logits_of(params, batch["tokens"])
    z = jax.nn.logsumexp(logits, axis=-1)
    row_means = jnp.where(batch["mask"], z, 0).sum(1) / batch["mask"].sum(1)
    return {
        "tokens": token_sum,
        "sequences": BALANCE * jnp.sum(row_means**2),
        "micro_batches": PENALTY * jnp.sum(params["hidden"] ** 2),
        "constant": jnp.sum(jnp.where(batch["mask"], z**2, 0)) / 512.0,
    }


def count_fn(batch: Any) -> dict[str, Any]:
    return {
        "tokens": jnp.sum(batch["mask"]),
        "sequences": len(batch["mask"]),
        "micro_batches": 1,
        "constant": None,
    }


def loss_of_whole(params: Any, batch: Any) -> jax.Array:
    terms, counts = terms_fn(params, batch), count_fn(batch) | {"constant": 1}
    return sum((terms[x] / counts[x] for x in terms), start=jnp.zeros(()))


float64_gradient = helpers.in_float64(jax.grad(loss_of_whole))


def test_gradient_is_that_of_the_full_batch_and_one_denominator_is_not():
    k = 8
    f = jax.jit(window_value_and_grad(terms_fn, count_fn=count_fn))

    @jax.jit
    @window_value_and_grad
    def one_denominator(params: Any, batch: Any) -> Any:
        terms = terms_fn(params, batch).values()
        return sum(terms, start=jnp.zeros(())), jnp.sum(batch["mask"])

    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    reference = float64_gradient(params, batch)
    (loss, (counts, _)), grads = f(params, helpers.stacked(batch, k))
    np.testing.assert_allclose(loss, jax.jit(loss_of_whole)(params, batch), rtol=2e-6)
    assert helpers.relative_error(grads, reference) < helpers.RTOL["float32"]
    assert counts.pop("constant") is None
    assert {name: float(n) for name, n in counts.items()} == {
        "tokens": batch["mask"].sum(),
        "sequences": helpers.ROWS,
        "micro_batches": k,
    }
    _, naive = one_denominator(params, helpers.stacked(batch, k))
    assert helpers.relative_error(naive, reference) > 0.01


def test_a_window_step_divides_by_the_counts_of_what_ran():
    def loss_fn(params: Any, batch: Any, *, scale: Any) -> Any:
        terms = terms_fn(params, batch)
        return terms | {"tokens": scale * terms["tokens"]}, terms["tokens"]

    step = make_window_step(
        loss_fn, optax.sgd(1.0, momentum=0.0), has_aux=True, count_fn=count_fn
    )
    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    for n in (5, 8):
        state, metrics = step(
            step.init(params), helpers.stacked(batch, 8), num_micro_batches=n, scale=1.0
        )
        rows = jax.tree.map(operator.itemgetter(slice(4 * n)), batch)
        given = optax.tree.get(state.opt_state, "trace")
        reference = float64_gradient(params, rows)
        assert helpers.relative_error(given, reference) < helpers.RTOL["float32"]
        assert float(metrics.num_tokens["micro_batches"]) == n
        assert float(metrics.num_tokens["sequences"]) == 4 * n
        assert metrics.aux.shape == (8,) and bool(metrics.updated)


def test_terms_and_micro_batches_without_a_count_add_nothing():
    f = window_value_and_grad(
        lambda w, x: {"a": w * x["a"], "b": w * x["b"]},
        count_fn=lambda x: {"a": x["n_a"], "b": x["n_b"]},
    )
    window = {
        "a": jnp.asarray([2.0, 4.0, np.nan]),  # the last micro-batch has no counts
        "b": jnp.asarray([0.0, 6.0, np.nan]),
        "n_a": jnp.asarray([1, 1, 0]),
        "n_b": jnp.asarray([0, 3, 0]),
    }
    (loss, _), grad = f(jnp.asarray(1.0), window)
    assert (float(loss), float(grad)) == (5.0, 5.0)
    (loss, _), grad = f(jnp.asarray(1.0), window | {"n_b": jnp.zeros(3, int)})
    assert (float(loss), float(grad)) == (3.0, 3.0)


def test_needs_one_accumulator_of_the_parameters_size():
    w, window = jnp.ones((256, 256)), jnp.ones((8, 1, 256))

    def losses(w: Any, x: Any) -> dict[str, jax.Array]:
        y = jnp.tanh(x @ w)
        return {str(i): jnp.sum(y**i) for i in range(1, 5)}

    def total(w: Any, x: Any) -> Any:
        return sum(losses(w, x).values(), start=jnp.zeros(())), 1

    def temporary_bytes(f: Any) -> int:
        # As users compile it, whatever the options of the test suite.
        optimized = {"xla_backend_optimization_level": 3}
        compiled = jax.jit(f).lower(w, window).compile(optimized)
        return compiled.memory_analysis().temp_size_in_bytes

    one = temporary_bytes(window_value_and_grad(total))
    of_losses = window_value_and_grad(
        losses, count_fn=lambda x: {"1": 1, "2": 1, "3": x.size, "4": None}
    )
    assert temporary_bytes(of_losses) - one < w.nbytes / 100


def test_errors_say_what_does_not_fit():
    def refuses(error: Any, message: str, loss: Any, counts: Any):
        f = window_value_and_grad(lambda p, b: loss, count_fn=counts)
        with pytest.raises(error, match=message):
            f(jnp.asarray(1.0), jnp.ones((2, 3)))

    a, ab = {"a": 1.0}, {"a": 1.0, "b": 1.0}
    refuses(ValueError, r"\['a', 'b'\] and counts \['a'\].*alone", ab, lambda b: a)
    refuses(TypeError, "loss_fn must return a dictionary", (1.0, 1), lambda b: a)
    refuses(TypeError, "count_fn must return a dictionary", a, lambda b: b.size)
    refuses(ValueError, "the count 'a' must be a scalar", a, lambda b: {"a": b})
