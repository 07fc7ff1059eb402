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
from meshes import TYPES, make_mesh, make_step

K, ROWS, LENGTH = 4, 16, 4
X = np.random.default_rng(0).integers(0, 4, (K, ROWS, LENGTH)).astype(np.float32)
WINDOW = {"x": X, "n": np.full(K, ROWS * LENGTH, np.float32)}
Count = Callable[..., Any]
ONES = jnp.ones(LENGTH)


ALIKE: dict[str, Count] = {
    "not 0": lambda batch, **_: jnp.maximum(batch["n"].astype(jnp.float32), 1),
    "keyword": lambda batch, number, **_: number,
    "parameter": lambda batch, params, **_: jnp.sum(params["w"]) + 1,
    # Right, but nothing tells their number of rows from a constant.
    "size times a scalar": lambda batch, **_: batch["x"].size * batch["n"],
    "weight of each": lambda batch, **_: jnp.sum(jnp.full(len(batch["x"]), batch["n"])),
}


OWN: dict[str, Count] = {
    "constant": lambda batch, **_: jnp.sum(ONES),
    "counted times a scalar": lambda batch, **_: jnp.sum(batch["x"] != 0) * batch["n"],
    "random mask": lambda batch, rng, **_: jnp.sum(
        jax.random.bernoulli(rng, shape=batch["x"].shape)
    ),
    "place": lambda batch, **_: batch["n"] * (1 + jax.lax.axis_index("data")),
    "branch": lambda batch, **_: jax.lax.cond(
        batch["x"][0, 0] > 0, lambda n: n, lambda n: 2 * n, batch["n"]
    ),
}


def plain(w: Any, x: Any, n: Any) -> Any:
    return jnp.sum(w * x), n


def asserts(w: Any, x: Any, n: Any) -> Any:
    assert x.shape == (ROWS // 8, LENGTH)
    return plain(w, x, n)


def scans(w: Any, x: Any, n: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return (carry[0] + jnp.sum(w * row), carry[1]), None

    return jax.lax.scan(body, (0.0, n), x)[0]


def prints(w: Any, x: Any, n: Any) -> Any:
    jax.debug.callback(lambda *_: None, x, n)
    return plain(w, x, n)


@jax.custom_vjp
def with_rules(w: Any, x: Any, n: Any) -> Any:
    return jnp.sum(w * x), n * 1


with_rules.defvjp(
    lambda w, x, n: (with_rules(w, x, n), (w, x)),
    lambda kept, g: (g[0] * jnp.sum(kept[1], 0), g[0] * kept[0] + 0 * kept[1], None),
)

# Losses that pass a count on, and look at their rows besides.
LOSSES: dict[str, Any] = {
    "asserts the number of rows": asserts,
    "scan over rows": scans,
    "prints": prints,
    # Dead-code elimination does not look into such a call.
    "custom_vjp": with_rules,
}


def loss_with(count: Count, loss: Any = plain) -> Any:
    def loss_fn(params: Any, batch: Any, rng: Any, number: Any) -> Any:
        num_tokens = count(batch, params=params, rng=rng, number=number)
        return loss(params["w"], batch["x"], num_tokens)

    return loss_fn


@functools.cache
def state_of(way: str, mesh: Mesh) -> Any:
    step = make_step(way, optax.sgd(1.0), mesh)
    return step.init({"w": jnp.zeros(LENGTH)})


def trace(count: Count, loss: Any = plain, mesh: Any = None, **changed: Any) -> None:
    way, mesh = changed.pop("way", "two programs"), mesh or make_mesh((8,))
    step = make_step(way, optax.sgd(1.0), mesh, loss_fn=loss_with(count, loss))
    call = step if "window" in way else step.accumulate
    kwargs = {"rng": jax.random.key(0), "number": jnp.float32(1)}
    batch = WINDOW if "window" in way else {n: x[0] for n, x in WINDOW.items()}
    jax.eval_shape(call, state_of(way, mesh), batch | changed, **kwargs)


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
    trace(OWN["counted times a scalar"], LOSSES[name])


def test_weakly_typed_rows_windows_and_meshes_of_both_types():
    for changed in (
        {"x": jnp.full((ROWS, LENGTH), 2.0)},
        {"way": "window"},
        *({"mesh": make_mesh((4, 2), kind)} for kind in TYPES),
    ):
        refuses(ALIKE["not 0"], times=4 if "mesh" in changed else 8, **changed)
        trace(OWN["counted times a scalar"], **changed)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": Mesh(jax.devices()[:1], "data")},
        {"mesh": make_mesh((8,)), "reduce_every": "micro_batch"},
        {"mesh": None, "data_axes": None},
    ],
    ids=["one device", "sums of all", "no mesh"],
)
def test_where_it_is_added_once_it_is_right(options: Any):
    loss_fn = loss_with(lambda batch, **_: batch["n"])
    step = make_step("window", optax.sgd(1.0), loss_fn=loss_fn, **options)
    state = step.init({"w": jnp.zeros(LENGTH)})
    state, metrics = step(state, WINDOW, rng=jax.random.key(0), number=1.0)
    assert metrics.num_tokens == X.size
    expected = X.astype(np.float64).sum((0, 1)) / X.size
    np.testing.assert_allclose(-state.params["w"], expected, rtol=1e-6)
    # What version 0.1.0 did on 8 devices, without an error.
    assert abs(expected / 8 - expected).max() > 0.1
