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

KS = [1, 2, 4, 8, 16, 32]
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


@jax.jit
@jax.value_and_grad
def full_batch(params: Any, batch: Any) -> jax.Array:
    terms, counts = terms_fn(params, batch), count_fn(batch)
    return sum(
        (terms[name] / (counts[name] or 1) for name in ("constant", "micro_batches")),
        start=terms["tokens"] / counts["tokens"]
        + terms["sequences"] / counts["sequences"],
    )


@helpers.in_float64
@jax.grad
def float64_loss_gradient(params: Any, batch: Any) -> Any:
    logits = helpers.logits_of(params, batch["tokens"])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"]
    )
    mask = batch["mask"]
    z = jax.nn.logsumexp(logits, axis=-1)
    row_means = jnp.where(mask, z, 0).sum(1) / mask.sum(1)
    return (
        jnp.where(mask, losses, 0).sum() / mask.sum()
        + BALANCE * (row_means**2).mean()
        + PENALTY * (params["hidden"] ** 2).sum()
        + jnp.where(mask, z**2, 0).sum() / 512.0
    )


@pytest.mark.parametrize("k", KS)
def test_gradient_is_that_of_the_full_batch_and_one_denominator_is_not(k: int):
    f = jax.jit(window_value_and_grad(terms_fn, count_fn=count_fn))
    one_denominator = jax.jit(
        window_value_and_grad(
            lambda params, batch: (
                sum(terms_fn(params, batch).values(), start=jnp.zeros(())),
                jnp.sum(batch["mask"]),
            )
        )
    )
    errors, full_errors = [], []
    for seed in range(5):
        params, batch = helpers.init_params(seed), helpers.ragged_batch(seed)
        reference = float64_loss_gradient(params, batch)
        (loss, (counts, _)), grads = f(params, helpers.stacked(batch, k))
        value, full_grads = full_batch(params, batch)
        np.testing.assert_allclose(loss, value, rtol=2e-6)
        errors.append(helpers.relative_error(grads, reference))
        full_errors.append(helpers.relative_error(full_grads, reference))
        assert counts["constant"] is None
        assert [float(counts[n]) for n in ("tokens", "sequences", "micro_batches")] == [
            batch["mask"].sum(),
            helpers.ROWS,
            k,
        ]
    assert np.median(errors) <= 2 * np.median(full_errors)
    _, naive = one_denominator(params, helpers.stacked(batch, k))
    assert helpers.relative_error(naive, reference) > 0.01


def test_partial_window_divides_by_the_counts_of_what_ran():
    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    f = jax.jit(
        lambda n: window_value_and_grad(terms_fn, count_fn=count_fn)(
            params, helpers.stacked(batch, 8), num_micro_batches=n
        )
    )
    for n in (1, 5, 8):
        rows = jax.tree.map(operator.itemgetter(slice(4 * n)), batch)
        (_, (counts, _)), grads = f(n)
        reference = float64_loss_gradient(params, rows)
        assert helpers.relative_error(grads, reference) < helpers.RTOL["float32"]
        assert float(counts["micro_batches"]) == n


def test_term_without_a_count_in_the_window_adds_nothing():
    def two(params: Any, batch: Any) -> Any:
        return {"a": jnp.sum(params * batch["a"]), "b": jnp.sum(params * batch["b"])}

    def counts(batch: Any) -> Any:
        return {"a": batch["a"].size, "b": batch["n"]}

    f = window_value_and_grad(two, count_fn=counts)
    micro_batches = {
        "a": jnp.asarray([[2.0], [4.0]]),
        "b": jnp.asarray([[0.0], [6.0]]),
        "n": jnp.asarray([0.0, 3.0]),
    }
    (loss, _), grad = f(jnp.asarray(1.0), micro_batches)
    assert (float(loss), float(grad)) == (5.0, 5.0)
    (loss, _), grad = f(jnp.asarray(1.0), micro_batches | {"n": jnp.zeros(2)})
    assert (float(loss), float(grad)) == (3.0, 3.0)


def test_micro_batch_in_which_every_count_is_0_adds_nothing_even_if_nan():
    f = window_value_and_grad(
        lambda w, x: {"a": w * x["x"], "b": w * x["x"] ** 2},
        count_fn=lambda x: {"a": x["n"], "b": 2 * x["n"]},
    )
    micro_batches = {"x": jnp.asarray([2.0, np.nan]), "n": jnp.asarray([1, 0])}
    (loss, _), grad = f(jnp.asarray(1.0), micro_batches)
    assert (float(loss), float(grad)) == (4.0, 4.0)


def test_window_step_with_several_losses():
    def loss_fn(params: Any, batch: Any, *, scale: Any) -> Any:
        terms = terms_fn(params, batch)
        return terms | {"tokens": scale * terms["tokens"]}, terms["tokens"]

    step = make_window_step(
        loss_fn, optax.sgd(1.0, momentum=0.0), has_aux=True, count_fn=count_fn
    )
    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    state, metrics = step(step.init(params), helpers.stacked(batch, 4), scale=1.0)
    given = optax.tree.get(state.opt_state, "trace")
    reference = float64_loss_gradient(params, batch)
    assert helpers.relative_error(given, reference) < helpers.RTOL["float32"]
    assert float(metrics.num_tokens["sequences"]) == helpers.ROWS
    assert metrics.aux.shape == (4,) and bool(metrics.updated)


@pytest.mark.slow
def test_needs_one_accumulator_of_the_parameters_size():
    # Parameters that are large compared with what a micro-batch of one row needs.
    params = {
        "embed": jnp.ones((helpers.VOCABULARY, 512)),
        "hidden": jnp.ones((512, 512)),
        "out": jnp.ones((512, helpers.VOCABULARY)),
    }
    window = helpers.stacked(helpers.ragged_batch(0, rows=8), 8)

    def without_penalty(terms: dict[str, Any]) -> dict[str, Any]:
        # XLA may compute the gradient of a penalty once, before the loop, and keep it.
        return {name: x for name, x in terms.items() if name != "micro_batches"}

    def losses(params: Any, batch: Any) -> dict[str, jax.Array]:
        return without_penalty(terms_fn(params, batch))

    def counts(batch: Any) -> dict[str, Any]:
        return without_penalty(count_fn(batch))

    def total(params: Any, batch: Any) -> Any:
        terms = losses(params, batch).values()
        return sum(terms, start=jnp.zeros(())), jnp.sum(batch["mask"])

    def one_accumulator_a_loss(params: Any, window: Any) -> Any:
        def add(sums: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.jacrev(losses)(params, batch)), ()

        zeros = dict.fromkeys(counts(window), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add, zeros, window)
        return jax.tree.map(lambda *grads: sum(grads), *sums.values())

    def temporary_bytes(f: Any) -> int:
        # As users compile it, whatever the options of the test suite.
        optimized = {"xla_backend_optimization_level": 3}
        compiled = jax.jit(f).lower(params, window).compile(optimized)
        return compiled.memory_analysis().temp_size_in_bytes

    one = temporary_bytes(window_value_and_grad(total))
    several = temporary_bytes(window_value_and_grad(losses, count_fn=counts))
    gradient_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    assert several - one < gradient_bytes / 100
    assert temporary_bytes(one_accumulator_a_loss) - one > 2 * gradient_bytes


def test_errors_say_what_does_not_fit():
    params, window = jnp.asarray(1.0), jnp.ones((2, 3))

    def run(loss_fn: Any, count_fn: Any, **kwargs: Any) -> Any:
        return window_value_and_grad(loss_fn, count_fn=count_fn, **kwargs)(
            params, window
        )

    with pytest.raises(
        ValueError, match=r"losses \['a', 'b'\] and counts \['a'\].*alone"
    ):
        run(lambda p, b: {"a": p, "b": p}, lambda b: {"a": 1})
    with pytest.raises(ValueError, match=r"losses \['a'\] and counts \['a', 'b'\]"):
        run(lambda p, b: {"a": p}, lambda b: {"a": 1, "b": 2})
    with pytest.raises(TypeError, match="loss_fn must return a dictionary"):
        run(lambda p, b: (p, 1), lambda b: {"a": 1})
    for returned in ({"a": 1.0, "b": 1.0}, ({"a": 1.0}, 2, 3)):
        with pytest.raises(TypeError, match=r"must return \(\{name: loss_sum\}, aux\)"):
            run(lambda p, b, r=returned: r, lambda b: {"a": 1}, has_aux=True)
    with pytest.raises(TypeError, match="count_fn must return a dictionary"):
        run(lambda p, b: {"a": p}, lambda b: b.size)
    with pytest.raises(ValueError, match="the count 'a' must be a scalar"):
        run(lambda p, b: {"a": p}, lambda b: {"a": b})
    with pytest.raises(TypeError, match="count_fn must be a function"):
        run(lambda p, b: {"a": p}, {"a": 1})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        run(lambda p, b: {"a": p}, lambda params, batch: {"a": jnp.sum(params)})
