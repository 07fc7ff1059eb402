"""Devices with different numbers of tokens, with none, or with rejected rows."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import run_step
from jax.sharding import Mesh
from meshes import ALL_WAYS, make_mesh

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    pad_window,
    plan_window,
    regroup_sums,
)

DEVICES = 8
SGD = optax.sgd(1.0)


def loss_fn(w: Any, x: Any) -> Any:
    """A loss in which tokens are the nonzero numbers.

    It takes the mean of each row first, which is 0/0 in a row without tokens.
    """
    n = jnp.sum(x != 0, axis=-1)
    means = jnp.sum(w * x, axis=-1) / n
    return jnp.sum(jnp.where(n > 0, means * n, 0)), jnp.sum(n)


def mean_first(w: Any, x: Any) -> Any:
    """A loss whose gradient is NaN on a device without tokens."""
    n = jnp.sum(x != 0)
    return jnp.sum(w * x) / n * n, n


def make_step(way: str, loss_fn: Any, optimizer: Any = SGD, **options: Any) -> Any:
    options = {"mesh": make_mesh((DEVICES,)), "loss_fn": loss_fn, "k": 3} | options
    return meshes.make_step(way, optimizer, **options)


def run(way: str, step: Any, state: Any, window: Any, **kwargs: Any) -> Any:
    return run_step(step, state, [window] if "window" in way else window, **kwargs)


def inner_state(way: str, state: Any) -> Any:
    own = state.opt_state
    return own if way == "nnx window" else own.inner_opt_state


def ragged(*, rows: int = DEVICES) -> np.ndarray:
    """Return 3 micro-batches `[rows, 4]` of numbers, 0 where there is no token."""
    rng = np.random.default_rng(0)
    window = rng.integers(1, 9, (3, rows, 4)).astype(np.float32)
    return np.where(np.arange(4) < rng.integers(1, 5, (3, rows, 1)), window, 0)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_devices_and_micro_batches_without_tokens(way: str):
    window = ragged()
    window[:, 2], window[1, 4:], window[2] = 0, 0, 0
    step = make_step(way, mean_first)
    state, metrics = run(way, step, step.init(jnp.zeros(())), window)
    tokens = (window != 0).sum()
    assert metrics.num_tokens == tokens and metrics.updated
    np.testing.assert_allclose(state.params, -window.sum() / tokens, rtol=1e-6)
    means = [d[d != 0].mean() for d in window.swapaxes(0, 1) if (d != 0).any()]
    assert abs(np.mean(means) - window.sum() / tokens) > 1e-2


@pytest.mark.parametrize("way", ALL_WAYS)
def test_window_without_tokens_anywhere_changes_nothing(way: str):
    step = make_step(way, mean_first, optax.adam(1.0))
    before = step.init(jnp.ones(()))
    expected = jax.device_get((before.params, inner_state(way, before)))
    after, metrics = run(way, step, before, np.zeros((3, DEVICES, 4), np.float32))
    assert not metrics.updated and metrics.num_tokens == 0
    chex.assert_trees_all_equal((after.params, inner_state(way, after)), expected)


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("way", ["one program", "window"])
def test_rejection_on_one_device_rejects_on_all(way: str, reduce_every: Any):
    window = ragged()
    step = make_step(
        way,
        loss_fn,
        should_skip_update_fn=optax.skip_not_finite,
        reduce_every=reduce_every,
    )
    bad = window.copy()
    bad[1, 5, 0] = np.inf
    state = step.init(jnp.zeros(()))
    if "window" in way:
        state, metrics = step(state, bad)
        assert metrics.skipped
        left = window[[0, 2]]
    else:
        skips = []
        for micro_batch in (bad[0], bad[1], bad[2], window[1]):
            state, metrics = step(state, micro_batch)
            skips.append((bool(metrics.skipped), int(metrics.mini_step)))
        assert skips == [(False, 1), (True, 1), (False, 2), (False, 0)]
        left = window
    assert metrics.num_tokens == (left != 0).sum()
    exact = -left.sum() / (left != 0).sum()
    np.testing.assert_allclose(state.params, exact, rtol=1e-6)


def test_token_budget_counts_all_devices():
    step = make_train_step(
        loss_fn,
        SGD,
        every_n_tokens=40,
        mesh=make_mesh((DEVICES,)),
        data_axes="data",
    )
    state, closed = step.init(jnp.zeros(())), []
    for row in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]):  # 8, 24, 56 tokens
        state, metrics = step(state, np.tile(np.float32(row), (DEVICES, 1)))
        closed.append((bool(metrics.updated), float(metrics.num_tokens)))
    assert closed == [(False, 8), (False, 24), (True, 56)]


def test_partial_window():
    step, window = make_step("two programs", loss_fn), ragged()
    state = step.init(jnp.zeros(()))
    state, _ = step.accumulate(state, window[0])
    state, metrics = step.close_window(state)
    assert metrics.updated
    exact = -window[0].sum() / (window[0] != 0).sum()
    np.testing.assert_allclose(state.params, exact, rtol=1e-6)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_no_two_devices_or_micro_batches_share_a_key(way: str):
    def loss_fn(w: Any, x: Any, rng: Any) -> Any:
        return jnp.sum(w * x), (x.size, jax.random.bits(rng))

    step = make_step(way, loss_fn, has_aux=True)
    state, window, key = step.init(jnp.zeros(())), ragged(), jax.random.key(0)
    if "window" in way:
        bits = step(state, window, rng=key)[1].aux
    else:
        bits = []
        for micro_batch in window:
            state, metrics = step(state, micro_batch, rng=key)
            bits.append(metrics.aux)
    bits = np.stack(bits)
    assert bits.shape == (3, DEVICES) and len(np.unique(bits)) == bits.size


@pytest.mark.parametrize("way", ALL_WAYS)
def test_aux_of_every_device_and_shared_arguments(way: str):
    def loss_fn(w: Any, x: Any, frozen: Any, sign: str) -> Any:
        loss = jnp.sum(w * x) * frozen * (-1 if sign == "minus" else 1)
        return loss, (x.size, {"first": x[0], "sum": jnp.sum(x)})

    step = make_step(way, loss_fn, has_aux=True)
    window, kwargs = ragged(), {"frozen": jnp.float32(2), "sign": "minus"}
    state, metrics = run(way, step, step.init(jnp.zeros(())), window, **kwargs)
    aux, of = metrics.aux, window if "window" in way else window[-1]
    np.testing.assert_array_equal(aux["first"], of)
    np.testing.assert_array_equal(aux["sum"], of.sum(-1))
    np.testing.assert_allclose(state.params, 2 * window.mean(), rtol=1e-6)


def test_several_losses_are_divided_by_the_counts_of_all_devices():
    def losses(w: Any, x: Any) -> Any:
        return {"small": jnp.sum(w * x * (x < 4)), "all": jnp.sum(w * x)}

    def counts(x: Any) -> Any:
        return {"small": jnp.sum((x < 4) & (x > 0)), "all": jnp.sum(x > 0)}

    step, window = make_step("window", losses, count_fn=counts), ragged()
    state, metrics = step(step.init(jnp.zeros(())), window)
    small = window[(window < 4) & (window > 0)]
    expected = small.mean() + window[window > 0].mean()
    np.testing.assert_allclose(-state.params, expected, rtol=1e-6)
    assert metrics.num_tokens["small"] == small.size


def test_only_the_first_micro_batches():
    step, window = make_step("window", loss_fn), ragged()
    state, metrics = step(step.init(jnp.zeros(())), window, num_micro_batches=2)
    exact = -window[:2].sum() / (window[:2] != 0).sum()
    np.testing.assert_allclose(state.params, exact, rtol=1e-6)


@pytest.mark.parametrize("devices", [8, 4])
def test_planned_window_is_shared_by_the_devices(devices: int):
    """Sequences of many lengths, in micro-batches of two shapes and 8 parts."""
    rng = np.random.default_rng(0)
    sequences = [
        {"x": rng.integers(1, 9, n).astype(np.float32), "weight": np.float32(n % 3)}
        for n in rng.integers(1, 17, 50)
    ]
    settings = {"max_tokens": 128, "length_buckets": [4, 16], "batch_multiple": 8}
    window = pad_window(sequences, pad_values=0, **settings)
    plans = plan_window([len(s["x"]) for s in sequences], **settings)
    assert {plan.num_rows for plan in plans} == {8, 32}

    def loss_fn(w: Any, batch: Any) -> Any:
        weights = (batch["x"] != 0) * batch["weight"][:, None]
        rows = batch["x"].shape[0]
        assert rows in (8 // devices, 32 // devices)
        return jnp.sum(w * batch["x"] * weights), jnp.sum(weights)

    step = make_window_step(
        loss_fn,
        SGD,
        mesh=make_mesh((devices,)) if devices == 8 else make_mesh((4, 2)),
        data_axes="data",
    )
    state, metrics = step(step.init(jnp.zeros(())), window)
    total = sum(float(s["x"].sum() * s["weight"]) for s in sequences)
    tokens = sum(float(s["x"].size * s["weight"]) for s in sequences)
    assert metrics.num_tokens == tokens
    np.testing.assert_allclose(state.params, -total / tokens, rtol=1e-6)


def layouts() -> dict[str, Any]:
    options = {"data_axes": "data"}
    four, three = (Mesh(jax.devices()[:n], "data") for n in (4, 3))
    return {
        "8": options | {"mesh": make_mesh((8,))},
        "4 x 2": options | {"mesh": make_mesh((4, 2))},
        "4": options | {"mesh": four},
        "3": options | {"mesh": three},
        "sharded sums": options
        | {"mesh": make_mesh((8,)), "reduce_every": "micro_batch"},
        "1": {"mesh": None, "data_axes": None},
    }


def as_dictionary(tree: Any) -> Any:
    """What Orbax returns for a tree that is restored without a target."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, tuple):
        tree = {str(i): x for i, x in enumerate(tree)}
    if isinstance(tree, dict):
        return {name: as_dictionary(x) for name, x in tree.items()}
    return tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("8", "4"), ("8", "4 x 2"), ("4", "8"), ("8", "3"), ("8", "1"), ("1", "8")]
    + [("8", "sharded sums"), ("sharded sums", "8"), ("8", "8")],
)
def test_open_window_goes_on_with_other_devices(before: str, after: str):
    window = ragged(rows=24)
    params = {"w": 0.0, "unused": np.zeros((4, 8)), "empty": np.zeros((0, 4))}
    params = jax.tree.map(jnp.float32, params)

    def loss(params: Any, x: Any) -> Any:
        return loss_fn(params["w"], x)

    steps = [make_step("two programs", loss, **layouts()[n]) for n in (before, after)]
    state, _ = steps[0](steps[0].init(params), window[0])
    like = steps[1].init(params)
    saved = jax.device_get(state)  # as in a checkpoint
    for held in (saved, as_dictionary(saved), state):
        state = regroup_sums(held, like)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, like)
        assert all(jax.tree.leaves(same))
        assert state.opt_state.mini_step == 1
        for micro_batch in window[1:]:
            state, metrics = steps[1](state, micro_batch)
        assert metrics.updated and metrics.num_tokens == (window != 0).sum()
        exact = -window.sum() / (window != 0).sum()
        np.testing.assert_allclose(state.params["w"], exact, rtol=1e-6)


def test_same_devices_get_the_same_sums_bit_for_bit():
    step, window = make_step("two programs", loss_fn), ragged()
    state, _ = step(step.init(jnp.zeros(())), window[0])
    saved = jax.device_get(state)
    chex.assert_trees_all_equal(regroup_sums(saved, state), jax.device_get(state))


@pytest.mark.parametrize("saved_as", [jnp.bfloat16, float])
def test_a_state_gets_the_dtypes_of_the_step_that_resumes(saved_as: Any):
    """Otherwise sums in bfloat16 go on in a step that adds up in float32."""
    step, window = make_step("two programs", loss_fn), ragged()
    like, expected = step.init(jnp.zeros(())), step.init(jnp.zeros(()))
    expected, _ = step(expected, window[0])

    def saved(x: Any) -> Any:
        x = jax.device_get(x)
        if saved_as is not float:
            return x.astype(saved_as) if x.dtype == jnp.float32 else x
        return x if x.ndim else x.item()

    state = regroup_sums(jax.tree.map(saved, expected), like)
    types = [[*map(jax.typeof, jax.tree.leaves(x))] for x in (state, expected)]
    assert types[0] == types[1]  # weak types, too
    chex.assert_trees_all_equal(state, expected)  # whole numbers, exact in bfloat16


@pytest.mark.parametrize("after", ["4", "1", "no mesh"])
def test_regrouping_inside_of_a_jit(after: str):
    window = ragged()
    steps = make_step("two programs", loss_fn), make_train_step(loss_fn, SGD, 3)
    if after != "no mesh":
        mesh = make_mesh((int(after),))
        steps = steps[0], make_step("two programs", loss_fn, mesh=mesh)
    state, _ = steps[0](steps[0].init(jnp.zeros(())), window[0])
    like = steps[1].init(jnp.zeros(()))
    saved = jax.device_get(state)
    state = jax.jit(lambda saved: regroup_sums(saved, like))(saved)
    for micro_batch in window[1:]:
        state, _ = steps[1](state, micro_batch)
    exact = -window.sum() / (window != 0).sum()
    np.testing.assert_allclose(state.params, exact, rtol=1e-6)


def test_sums_of_devices_in_a_step_without():
    state = make_step("two programs", loss_fn).init(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"expected shape \(\), got \(8,\)"):
        make_train_step(loss_fn, SGD, 3)(state, ragged()[0])


def test_nothing_is_lost_by_a_bad_batch():
    step, window = make_step("two programs", loss_fn), ragged()
    state, _ = step(step.init(jnp.zeros(())), window[0])
    with pytest.raises(ValueError, match="multiple of the 8 devices"):
        step(state, ragged(rows=9)[1])
    for micro_batch in window[1:]:
        state, metrics = step(state, micro_batch)
    exact = -window.sum() / (window != 0).sum()
    np.testing.assert_allclose(state.params, exact, rtol=1e-6)
