"""Counts that are equal on all devices, which would be added once per device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from meshes import ALL_WAYS, TYPES, make_mesh, make_step

from optax_tokenaccum import make_window_step

K, ROWS, LENGTH = 4, 16, 4
X = np.random.default_rng(0).integers(0, 4, (K, ROWS, LENGTH)).astype(np.float32)
Count = Callable[..., Any]
ONES = jnp.ones(LENGTH)


def in_a_call(wrap: Any) -> Count:
    """The count passes through a call that the rows pass through as well."""

    def count(batch: Any, **_: Any) -> Any:
        return wrap(lambda x, n: (jnp.sum(x), n))(batch["x"], batch["n"])[1]

    return count


def in_a_scan(batch: Any, **_: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        total, n = carry
        return (total + x * jnp.sum(batch["x"]), n * 1), None

    return jax.lax.scan(body, (jnp.zeros(()), batch["n"]), jnp.ones(3))[0][1]


def custom_vjp(f: Any) -> Any:
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (f(*xs), None), lambda _, g: (g[0], g[1]))
    return g


def custom_jvp(f: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda xs, ts: (f(*xs), ts))
    return g


ALIKE: dict[str, Count] = {
    "of the batch": lambda batch, **_: batch["n"],
    "not 0": lambda batch, **_: jnp.maximum(batch["n"].astype(jnp.float32), 1),
    "keyword": lambda batch, number, **_: number,
    "parameter": lambda batch, params, **_: jnp.sum(params["w"]) + 1,
    "jit": in_a_call(jax.jit),
    "remat": in_a_call(jax.checkpoint),
    "custom_vjp": in_a_call(custom_vjp),
    "custom_jvp": in_a_call(custom_jvp),
    "scan": in_a_scan,
}


def through_a_ref(batch: Any, **_: Any) -> Any:
    ref = jax.new_ref(batch["n"] * 0.0)
    ref[...] = jnp.sum(batch["x"] != 0, dtype=jnp.float32)
    return ref[...]


def in_a_loop(batch: Any, **_: Any) -> Any:
    """Depends on the rows from the second iteration, through two loop variables."""

    def body(carry: Any, _: Any) -> Any:
        count, seen, new = carry
        return (count + seen, new, jnp.sum(batch["x"])), None

    start = batch["n"], 0 * batch["n"], 0 * batch["n"]
    return jax.lax.scan(body, start, length=3)[0][0]


OWN: dict[str, Count] = {
    "mask": lambda batch, **_: jnp.sum(batch["x"] != 0),
    "size": lambda batch, **_: batch["x"].size,
    "one": lambda batch, **_: 1,
    "constant": lambda batch, **_: jnp.sum(ONES),
    "mask times a scalar": lambda batch, **_: jnp.sum(batch["x"] != 0) * batch["n"],
    "size times a scalar": lambda batch, **_: batch["x"].size * batch["n"],
    "weight of each": lambda batch, **_: jnp.sum(jnp.full(len(batch["x"]), batch["n"])),
    "random mask": lambda batch, rng, **_: jnp.sum(
        jax.random.bernoulli(rng, shape=batch["x"].shape)
    ),
    "place": lambda batch, **_: batch["n"] * (1 + jax.lax.axis_index("data")),
    "branch": lambda batch, **_: jax.lax.cond(
        batch["x"][0, 0] > 0, lambda n: n, lambda n: 2 * n, batch["n"]
    ),
    "callback": lambda batch, **_: jax.pure_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
    ),
    "jit": jax.jit(lambda batch, **_: batch["n"] + jnp.sum(batch["x"])),
    "where": lambda batch, **_: jnp.where(batch["x"].any(), batch["n"], 0),
    "while": lambda batch, **_: jax.lax.while_loop(
        lambda n: n < jnp.sum(batch["x"]), lambda n: n + 1, batch["n"]
    ),
    "rows of a scan": lambda batch, **_: jax.lax.scan(
        lambda n, _: (n + 1, None), batch["n"], batch["x"]
    )[0],
    "trips of a loop": lambda batch, **_: jax.lax.fori_loop(
        0, len(batch["x"]), lambda _, n: n + 1, batch["n"]
    ),
    "scan": in_a_loop,
    "ref": through_a_ref,
}


def plain(w: Any, x: Any, n: Any) -> Any:
    return jnp.sum(w * x), n


def asserts(w: Any, x: Any, n: Any) -> Any:
    assert x.shape == (ROWS // 8, LENGTH)
    return plain(w, x, n)


def loops(w: Any, x: Any, n: Any) -> Any:
    return sum(jnp.sum(w * row) for row in x), n


def in_a_switch(w: Any, x: Any, n: Any) -> Any:
    """The count is computed in every branch, which the model's weights choose."""
    branches = [lambda w, x, n: plain(w, x, n + 1), lambda w, x, n: plain(w, -x, n)]
    return jax.lax.switch(jnp.int32(w[0] > 0), branches, w, x, n)


def scans(w: Any, x: Any, n: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return (carry[0] + jnp.sum(w * row), carry[1]), None

    return jax.lax.scan(body, (0.0, n), x)[0]


def whiles(w: Any, x: Any, n: Any, rounds: int | None = None) -> Any:
    """With a number of `rounds`, the count changes in each."""

    def body(carry: Any) -> Any:
        i, total, n = carry
        total += jnp.sum(jax.lax.stop_gradient(w) * x[0 if rounds else i])
        return i + 1, total, n * 1.5 if rounds else n

    return jax.lax.while_loop(
        lambda carry: carry[0] < (rounds or len(x)), body, (0, 0.0, n)
    )[1:]


def prints(w: Any, x: Any, n: Any) -> Any:
    jax.debug.callback(lambda *_: None, x, n)
    return plain(w, x, n)


# Losses that pass a count on, and look at their rows besides.
FOR_THESE_ROWS: dict[str, Any] = {
    "asserts the number of rows": asserts,
    "constant of fixed shape": lambda w, x, n: plain(w, x + np.ones((2, 4)), n),
}
LOSSES: dict[str, Any] = FOR_THESE_ROWS | {
    "loop in jit": jax.jit(loops),
    "loop in remat": jax.checkpoint(loops),
    "branch on the number of rows": lambda w, x, n: plain(
        w, x if len(x) == ROWS // 8 else jnp.tanh(x), n
    ),
    "cond": lambda w, x, n: jax.lax.cond(
        x[0, 0] > 1, plain, lambda w, x, n: (0.0, n), w, x, n
    ),
    "switch": in_a_switch,
    "scan over rows": scans,
    "while": whiles,
    "while that counts": functools.partial(whiles, rounds=3),
    "prints": prints,
    "barrier": lambda *args: jax.lax.optimization_barrier(plain(*args)),
}


def loss_with(count: Count, loss: Any = plain) -> Any:
    def loss_fn(params: Any, batch: Any, rng: Any, number: Any) -> Any:
        num_tokens = count(batch, params=params, rng=rng, number=number)
        return loss(params["w"], batch["x"], num_tokens)

    return loss_fn


def batches(way: str) -> list[Any]:
    n = np.full(K, ROWS * LENGTH, np.float32)
    if "window" in way:
        return [{"x": X, "n": n}]
    return [{"x": X[i], "n": n[i]} for i in range(K)]


@functools.cache
def state_of(way: str, mesh: Mesh) -> Any:
    step = make_step(way, optax.sgd(1.0), mesh)
    return step.init({"w": jnp.zeros(LENGTH)})


def trace(count: Count, loss: Any = plain, mesh: Any = None, **changed: Any) -> None:
    way, mesh = changed.pop("way", "two programs"), mesh or make_mesh((8,))
    step = make_step(way, optax.sgd(1.0), mesh, loss_fn=loss_with(count, loss))
    call = step if "window" in way else step.accumulate
    kwargs = {"rng": jax.random.key(0), "number": jnp.float32(1)}
    batch = batches(way)[0] | changed
    jax.eval_shape(call, state_of(way, mesh), batch, **kwargs)


def refuses(*args: Any, times: int = 8, **kwargs: Any) -> None:
    message = f"num_tokens must be a count of .* {times} times.*" r"mask\.sum\(\)"
    with pytest.raises(ValueError, match=message):
        trace(*args, **kwargs)


@pytest.mark.parametrize("name", ALIKE)
def test_count_that_is_alike_on_all_devices_is_refused(name: str):
    refuses(ALIKE[name])


@pytest.mark.parametrize("name", OWN)
def test_count_of_the_device_is_not(name: str):
    trace(OWN[name])


@pytest.mark.parametrize("name", LOSSES)
def test_whatever_else_the_loss_does_with_its_rows(name: str):
    refuses(ALIKE["not 0"], LOSSES[name])
    trace(OWN["mask times a scalar"], LOSSES[name])
    trace(OWN["size"], LOSSES[name])
    # In a loss for one number of rows, nothing tells that number from a constant.
    weighted = refuses if name in FOR_THESE_ROWS else trace
    weighted(OWN["size times a scalar"], LOSSES[name])


def test_weakly_typed_rows_windows_and_meshes_of_both_types():
    x = jnp.full((ROWS, LENGTH), 2.0)
    assert x.weak_type
    for changed in (
        {"x": x},
        {"x": x, "weak": jnp.full((ROWS,), 2)},
        {"way": "window"},
        *({"mesh": make_mesh((4, 2), kind)} for kind in TYPES),
    ):
        refuses(ALIKE["not 0"], times=4 if "mesh" in changed else 8, **changed)
        trace(OWN["size times a scalar"], **changed)


@pytest.mark.parametrize("where", ["one device", "sums of all", "no mesh"])
def test_where_it_is_added_once_it_is_right(where: str):
    mesh = Mesh(jax.devices()[:1], "data") if where == "one device" else make_mesh((8,))
    options: dict[str, Any] = {"mesh": mesh}
    if where == "sums of all":
        options["reduce_every"] = "micro_batch"
    if where == "no mesh":
        options = {"mesh": None, "data_axes": None}
    loss_fn = loss_with(ALIKE["of the batch"])
    step = make_step("two programs", optax.sgd(1.0), loss_fn=loss_fn, **options)
    state = step.init({"w": jnp.zeros(LENGTH)})
    for batch in batches("two programs"):
        state, metrics = step(state, batch, rng=jax.random.key(0), number=1.0)
    assert metrics.num_tokens == X.size
    expected = X.astype(np.float64).sum((0, 1)) / X.size
    np.testing.assert_allclose(-state.params["w"], expected, rtol=1e-6)
    # What version 0.1.0 did on 8 devices, without an error.
    assert abs(expected / 8 - expected).max() > 0.1


@pytest.mark.parametrize("way", ALL_WAYS)
def test_weights_of_micro_batches_are_exact(way: str):
    """The weight multiplies both the sum and the device's token count."""

    def loss_fn(w: Any, batch: Any) -> Any:
        tokens = batch["x"].size
        return batch["weight"] * jnp.sum(w * batch["x"]), batch["weight"] * tokens

    step = make_step(way, optax.sgd(1.0), make_mesh((8,)), loss_fn=loss_fn)
    state, weights = step.init(jnp.zeros(())), np.float32([1, 2, 5, 0.5])
    if "window" in way:
        state, _ = step(state, {"x": X, "weight": weights})
    else:
        for x, weight in zip(X, weights, strict=True):
            state, _ = step(state, {"x": x, "weight": weight})
    expected = np.average(X.mean((1, 2), dtype=np.float64), weights=weights)
    np.testing.assert_allclose(-state.params, expected, rtol=1e-6)
    assert abs(expected - X.mean()) > 1e-3


def test_counts_of_several_losses():
    def loss_fn(w: Any, batch: Any) -> Any:
        return {"a": jnp.sum(w * batch["x"]), "b": jnp.sum(w * batch["x"] ** 2)}

    def trace_counts(count_fn: Any) -> None:
        options: dict[str, Any] = {"mesh": make_mesh((8,)), "data_axes": "data"}
        step = make_window_step(loss_fn, optax.sgd(1.0), count_fn=count_fn, **options)
        state, [batch] = step.init(jnp.zeros(())), batches("window")
        jax.eval_shape(step, state, batch)

    trace_counts(lambda batch: {"a": jnp.sum(batch["x"]), "b": batch["x"].size})
    trace_counts(lambda _: {"a": None, "b": 1})
    for count_fn, named in (
        (lambda batch: {"a": batch["n"], "b": None}, "'a'"),
        (lambda batch: {"a": jnp.sum(batch["x"]), "b": batch["n"]}, "'b'"),
    ):
        with pytest.raises(ValueError, match=f"the count {named} must be a count"):
            trace_counts(count_fn)


def test_no_second_trace_of_a_loss_whose_count_is_its_own():
    traces = []

    def count(batch: Any, **_: Any) -> Any:
        traces.append(None)
        return jnp.sum(batch["x"])

    trace(count)
    assert len(traces) == 2  # one to inspect, one to differentiate
