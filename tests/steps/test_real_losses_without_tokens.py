"""Losses that are real while their count is 0, against plain JAX on all rows.

Detection divides the focal loss of every anchor by the number of positive anchors, of
which an image, a device or a micro-batch may have none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import ways_in
import window_gradients as gradients
from flax import nnx
from helpers import relative_error, slow, stack
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import coupled_value_and_grad, make_train_step, make_window_step
from optax_tokenaccum import nnx as nnx_steps

Batches = list[dict[str, Any]]


def focal_loss(params: Any, batch: Any) -> Any:
    """A row has one anchor, which is positive or not."""
    logits = jnp.sum(gradients.through_layers(params, batch["x"]) * params["out"], -1)
    signed = jnp.where(batch["is_positive"], logits, -logits)
    losses = -(jax.nn.sigmoid(-signed) ** 2) * jax.nn.log_sigmoid(signed)
    return jnp.sum(losses), jnp.sum(batch["is_positive"])


def two_masks(params: Any, batch: Any) -> Any:
    """A term of all rows besides the one that the count is of."""
    y = gradients.through_layers(params, batch["x"]) @ params["out"]
    of_positive = jnp.sum(jnp.where(batch["is_positive"], (y - 1) ** 2, 0))
    return of_positive + jnp.sum(jnp.abs(y)), jnp.sum(batch["is_positive"])


def batches_of(*positives: list[int]) -> Batches:
    """Micro-batches of 8 rows, with the indices of those that are positive."""
    rng = np.random.default_rng(4)
    return [
        {
            "x": rng.normal(size=(8, gradients.WIDTH)).astype(np.float32),
            "is_positive": np.isin(np.arange(8), rows),
        }
        for rows in positives
    ]


BATCHES = batches_of([], [0, 5], [3])
WITHOUT_ANY = batches_of([], [])
OVER = ["1", "8", "8, explicit", "8, each", "8, explicit, each"]
LOSSES = [focal_loss, slow(two_masks)]


def of_all_rows(loss_fn: Any, batches: Batches) -> Any:
    """The gradient of a window, in float64, and what drops parts with a count of 0.

    The first drops micro-batches, the second rows, as on devices of a row each.
    """
    with jax.enable_x64(True):
        params = jax.tree.map(
            lambda x: np.asarray(x, np.float64), gradients.params_of()
        )
        rows = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
        rows["x"] = rows["x"].astype(np.float64)
        kept = np.repeat([b["is_positive"].any() for b in batches], 8)
        n = rows["is_positive"].sum()
        return [
            jax.grad(lambda p, x: loss_fn(p, x)[0] / n)(params, part)
            for part in (
                rows,
                {name: x[kept] for name, x in rows.items()},
                {name: x[rows["is_positive"]] for name, x in rows.items()},
            )
        ]


def check(got: Any, loss_fn: Any, batches: Batches = BATCHES) -> None:
    expected, *dropped = of_all_rows(loss_fn, batches)
    assert relative_error(got, expected) < 3e-6
    for wrong in dropped:
        assert relative_error(wrong, expected) > 0.1


def applied(params: Any) -> Any:
    return jax.tree.map(np.subtract, gradients.params_of(), params)


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("way", [gradients.train_step, gradients.window_step])
def test_steps(way: Any, over: str, loss_fn: Any):
    options = meshes.over(over)
    check(way(loss_fn, gradients.params_of(), BATCHES, **options), loss_fn)


def multi_steps(loss_fn: Any, inner: Any, k: int) -> Any:
    return ways_in.multi_steps(loss_fn, inner, k, gradients="sum")


def sum_fn(loss_fn: Any) -> Any:
    return loss_fn


@pytest.mark.parametrize(
    "way", [ways_in.transformation, multi_steps, ways_in.in_one_program]
)
def test_loops(way: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ways_in, "mean_of", sum_fn)
    run = way(focal_loss, optax.sgd(1.0), len(BATCHES))
    [params] = run(gradients.params_of(), [BATCHES])
    check(applied(params), focal_loss)


def test_gradients_of_a_window():
    params = gradients.params_of()
    check(gradients.value_and_grad(focal_loss, params, BATCHES), focal_loss)
    given = ways_in.of_gradients(focal_loss)
    check(jax.jit(given)(params, stack(BATCHES))[1], focal_loss)
    coupled = coupled_value_and_grad(focal_loss, lambda x: x[0].sum() / x[1].sum())
    check(jax.jit(coupled)(params, stack(BATCHES))[1], focal_loss)


@pytest.mark.parametrize(
    "options", [{}, {"should_skip_update_fn": optax.skip_not_finite}]
)
@pytest.mark.parametrize("over", ["1", "8"])
def test_whole_gradients_and_skip_functions(
    over: str, options: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPTAX_TOKENACCUM_ADD_AFTER", "1")
    options = options | meshes.over(over)
    got = gradients.train_step(focal_loss, gradients.params_of(), BATCHES, **options)
    check(got, focal_loss)


def test_your_own_shard_map():
    """One device has no positive rows in any micro-batch."""
    mesh, axis = meshes.make_mesh((8,)), "data"

    def of_devices(params: Any, rows: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Any:
            loss_sum, n = focal_loss(params, batch)
            return jax.lax.psum(loss_sum, axis), jax.lax.psum(n, axis)

        return gradients.window_value_and_grad(loss_fn)(params, rows)[1]

    mapped = jax.shard_map(
        of_devices, mesh=mesh, in_specs=(P(), P(None, axis)), out_specs=P()
    )
    check(jax.jit(mapped)(gradients.params_of(), stack(BATCHES)), focal_loss)


class Model(nnx.Module):
    def __init__(self) -> None:
        for name, x in gradients.params_of().items():
            setattr(self, name, nnx.Param(x))


@pytest.mark.parametrize("over", ["1", "8"])
def test_nnx(over: str):
    def loss_fn(model: Any, batch: Any) -> Any:
        return focal_loss({"layers": model.layers[...], "out": model.out[...]}, batch)

    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = nnx_steps.make_window_step(loss_fn, **meshes.over(over))
    step.init(model, optimizer)
    step(model, optimizer, stack(BATCHES))
    check(applied({"layers": model.layers[...], "out": model.out[...]}), focal_loss)


@pytest.mark.parametrize("over", ["1", "8"])
@pytest.mark.parametrize("make", [make_train_step, make_window_step])
def test_a_window_without_tokens_closes_without_an_update(make: Any, over: str):
    """What it held does not reach the next window."""
    k = (2,) if make is make_train_step else ()
    step = make(focal_loss, optax.adam(1.0), *k, **meshes.over(over))
    first = step.init(gradients.params_of())
    begun = jax.tree.map(np.asarray, first)
    after = []
    for state, windows in ((first, [WITHOUT_ANY, BATCHES[:2]]), (None, [BATCHES[:2]])):
        state = step.init(gradients.params_of()) if state is None else state
        for window in windows:
            for batch in window if k else [stack(window)]:
                state, metrics = step(state, batch)
            if window is WITHOUT_ANY:
                assert (metrics.updated, metrics.loss, metrics.num_tokens) == (0, 0, 0)
                jax.tree.map(np.testing.assert_array_equal, state.params, begun.params)
                for x in jax.tree.leaves(state.opt_state.grad_sums):
                    assert not np.any(x)
        after.append(jax.tree.map(np.asarray, state.params))
    jax.tree.map(np.testing.assert_array_equal, *after)


@pytest.mark.parametrize("over", ["1", "8"])
@pytest.mark.parametrize("count", [-1.0, np.nan, np.inf])
def test_a_count_that_cannot_be_adds_nothing(count: float, over: str):
    """A micro-batch, or the first device, has it."""

    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = focal_loss(params, batch)
        return loss_sum, jnp.where(batch["is_wrong"].any(), count, n)

    is_wrong = np.arange(8) == 0
    kept, wrong = BATCHES[1], {"x": BATCHES[0]["x"], "is_positive": is_wrong}
    batches = [kept | {"is_wrong": is_wrong & False}, wrong | {"is_wrong": is_wrong}]
    got = gradients.train_step(
        loss_fn, gradients.params_of(), batches, **meshes.over(over)
    )
    others = slice(1, None) if over == "8" else slice(0, 0)
    rest = {name: x[others] for name, x in wrong.items()}
    rows = {name: np.concatenate([kept[name], rest[name]]) for name in rest}
    n = rows["is_positive"].sum()
    params = gradients.params_of()
    expected = jax.grad(lambda p: focal_loss(p, rows)[0] / n)(params)
    assert relative_error(got, expected) < 3e-6
    everything = {name: np.concatenate([kept[name], wrong[name]]) for name in rest}
    naive = jax.grad(lambda p: focal_loss(p, everything)[0] / n)(params)
    assert relative_error(naive, expected) > 0.01


def test_the_loss_that_is_logged_is_that_of_all_rows():
    rows = {name: np.concatenate([b[name] for b in BATCHES]) for name in BATCHES[0]}
    expected = focal_loss(gradients.params_of(), rows)[0] / rows["is_positive"].sum()
    for over in ("1", "8"):
        step = make_window_step(focal_loss, optax.sgd(1.0), **meshes.over(over))
        _, metrics = step(step.init(gradients.params_of()), stack(BATCHES))
        np.testing.assert_allclose(metrics.loss, expected, rtol=1e-6)
