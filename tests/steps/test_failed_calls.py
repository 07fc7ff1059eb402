"""A call that fails during tracing or compilation loses nothing of the open window."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import optax
import pytest
import ways_in

from optax_tokenaccum import make_train_step

BATCHES = [ways_in.batch_of(i, [1] * (i + 1) + [0] * (3 - i)) for i in range(4)]
ON_MESH = {"one device": {}} | {
    f"8 devices, {reduce_every}": {
        "mesh": meshes.make_mesh((8,)),
        "data_axes": "data",
        "reduce_every": reduce_every,
    }
    for reduce_every in ("window", "micro_batch")
}


class Failing:
    """A schedule that raises when it is first traced."""

    def __init__(self, error: BaseException):
        self.errors = [error]

    def __call__(self, count: Any) -> float:
        if self.errors:
            raise self.errors.pop()
        return 1.0


def run(step: Any, batches: Any, retries: Any = ()) -> Any:
    """Repeat each failed call, whose arguments must still be alive."""
    state, failures = step.init(ways_in.PARAMS), 0
    for batch in batches:
        try:
            state, metrics = step(state, batch)
        except retries as error:
            failures += 1
            assert str(error) == "once"
            state, metrics = step(state, batch)
    assert failures == (retries != ())
    return state, metrics


@pytest.mark.parametrize("options", ON_MESH.values(), ids=ON_MESH)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_optimizer_leaves_the_window_open(options: Any, error: Any):
    batches = [ways_in.batch_of(i, [1.0] * 8 * (i + 1)) for i in range(4)]
    make = make_train_step
    failing = make(ways_in.loss_fn, optax.sgd(Failing(error("once"))), 4, **options)
    got, metrics = run(failing, batches, error)
    expected, _ = run(make(ways_in.loss_fn, ways_in.SGD, 4, **options), batches)
    chex.assert_trees_all_equal(got.params, expected.params)
    assert metrics.updated and metrics.num_tokens == 80


def test_an_interrupted_compilation_leaves_the_window_open(
    monkeypatch: pytest.MonkeyPatch,
):
    """Interrupts the long compilation of the second program, when sums exist."""
    step = make_train_step(ways_in.loss_fn, ways_in.SGD, 2)
    compile_ = jax.stages.Lowered.compile

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
        raise KeyboardInterrupt("once")

    monkeypatch.setattr(jax.stages.Lowered, "compile", interrupted)
    got, _ = run(step, BATCHES[:2], KeyboardInterrupt)
    expected, _ = run(make_train_step(ways_in.loss_fn, ways_in.SGD, 2), BATCHES[:2])
    chex.assert_trees_all_equal(got, expected)


def test_another_model_through_the_same_step_is_made_ready_too():
    fails_on_vectors = optax.stateless(_refuse_vectors)
    step = make_train_step(
        lambda params, x: (jnp.sum(params) * jnp.sum(x), x.size), fails_on_vectors, 2
    )
    scalar, vector = step.init(jnp.zeros(())), step.init(jnp.zeros(3))
    for _ in range(2):
        scalar, _ = step(scalar, jnp.ones(2))
    vector, _ = step.accumulate(vector, jnp.ones(2))
    with pytest.raises(ValueError, match="a vector"):
        step(vector, jnp.ones(2))
    assert not vector.opt_state.acc_grads.is_deleted()
    assert float(step.accumulate(vector, jnp.ones(2))[1].num_tokens) == 4


def _refuse_vectors(updates: Any, params: Any) -> Any:
    if updates.ndim:
        raise ValueError("a vector")
    return updates


@pytest.mark.parametrize("way", ways_in.WAYS[2:])
def test_an_optimizer_that_takes_no_value(way: Callable[..., Any]):
    """Every other update of `sam` only moves to an adversarial point."""
    inner = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    windows = [BATCHES[:2], BATCHES[2:], BATCHES[1:3], BATCHES[:2]]
    got = way(ways_in.loss_fn, inner, 2)(ways_in.PARAMS, windows)
    params, state = ways_in.PARAMS, inner.init(ways_in.PARAMS)
    for window, after in zip(windows, got, strict=True):
        gradient = jax.tree.map(jnp.float32, ways_in.exact(params, *window))
        updates, state = inner.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(after, params, rtol=1e-5)
