"""Counts that are equal on all devices, which would be added once per device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from meshes import make_mesh, make_step

K, ROWS, LENGTH = 4, 16, 4
X = np.random.default_rng(0).integers(0, 4, (K, ROWS, LENGTH)).astype(np.float32)
WINDOW = {"x": X, "n": np.full(K, ROWS * LENGTH, np.float32)}
ONES = jnp.ones(LENGTH)
ALIKE: dict[str, Any] = {
    "not 0": lambda batch, **_: jnp.maximum(batch["n"].astype(jnp.float32), 1),
    "keyword": lambda batch, number, **_: number,
    "parameter": lambda batch, params, **_: jnp.sum(params["w"]) + 1,
    # Right, but nothing tells its number of rows from a constant.
    "size times a scalar": lambda batch, **_: batch["x"].size * batch["n"],
}
OWN: dict[str, Any] = {
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


def scans(w: Any, x: Any, n: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return (carry[0] + jnp.sum(w * row), carry[1]), None

    return jax.lax.scan(body, (0.0, n), x)[0]


@jax.custom_vjp
def with_rules(w: Any, x: Any, n: Any) -> Any:
    return jnp.sum(w * x), n * 1


with_rules.defvjp(
    lambda w, x, n: (with_rules(w, x, n), (w, x)),
    lambda kept, g: (g[0] * jnp.sum(kept[1], 0), g[0] * kept[0] + 0 * kept[1], None),
)


def trace(count: Any, loss: Any, way: str = "two programs", **options: Any) -> None:
    def loss_fn(params: Any, batch: Any, rng: Any, number: Any) -> Any:
        num_tokens = count(batch, params=params, rng=rng, number=number)
        return loss(params["w"], batch["x"], num_tokens)

    options = {"mesh": make_mesh((8,)), "loss_fn": loss_fn} | options
    step = make_step(way, optax.sgd(1.0), **options)
    state = jax.eval_shape(step.init, {"w": jnp.zeros(LENGTH)})
    call = step if way == "window" else step.accumulate
    batch = WINDOW if way == "window" else {n: x[0] for n, x in WINDOW.items()}
    jax.eval_shape(call, state, batch, rng=jax.random.key(0), number=jnp.float32(1))


def case(count: str, loss: Any = plain, **options: Any) -> Any:
    words = [count, loss.__name__, *map(str, options.values())]
    return pytest.param(count, loss, options, id="-".join(words))


# Dead-code elimination does not look into the call of `with_rules`.
EXPLICIT = {"way": "window", "mesh": ((4, 2), "explicit")}


@pytest.mark.parametrize(
    ("count", "loss", "options"),
    [*map(case, ALIKE), *(case("not 0", x) for x in (scans, with_rules))]
    + [case("not 0", **EXPLICIT)],
)
def test_a_count_that_is_alike_on_all_devices_is_refused(
    count: str, loss: Any, options: Any
):
    times = 4 if options else 8
    message = f"num_tokens must count the rows .* {times} times. Sum their"
    mesh = make_mesh(*options.get("mesh", [(8,)]))
    with pytest.raises(ValueError, match=message):
        trace(ALIKE[count], loss, **options | {"mesh": mesh})


@pytest.mark.parametrize(
    ("count", "loss", "options"),
    [*map(case, OWN), *(case("counted times a scalar", x) for x in (scans, with_rules))]
    + [case("counted times a scalar", **EXPLICIT)],
)
def test_a_count_of_the_device_is_not(count: str, loss: Any, options: Any):
    mesh = make_mesh(*options.get("mesh", [(8,)]))
    trace(OWN[count], loss, **options | {"mesh": mesh})


def test_where_it_is_added_once_it_is_right():
    one, eight = Mesh(jax.devices()[:1], "data"), make_mesh((8,))
    trace(ALIKE["not 0"], plain, mesh=one)
    trace(ALIKE["not 0"], plain, mesh=eight, reduce_every="micro_batch")
    trace(ALIKE["not 0"], plain, mesh=None, data_axes=None)
