"""Windows in a `shard_map` of the caller's, whose types tell what differs."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from helpers import relative_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh
from problems import PARAMS

from optax_tokenaccum import (
    accumulate_over_window,
    window_value_and_grad,
)
from optax_tokenaccum._trees import as_varying

K, ROWS, DEVICES = 3, 16, 8
WHOLE, ROW_SPEC = P(), P(None, "data")


def of_gradients(loss_fn: Any) -> Any:
    return accumulate_over_window(jax.value_and_grad(loss_fn, has_aux=True))


WAYS = {"loss": window_value_and_grad, "gradients": of_gradients}


def micro_batches() -> Any:
    """Micro-batches whose devices have few tokens, many, and none at all."""
    weights = np.linspace(0, 9, ROWS).round() * np.ones((K, ROWS))
    weights[:, 4:6] = weights[1] = 0
    made = [problems.batch_of(i, w) for i, w in enumerate(weights)]
    return jax.tree.map(lambda *xs: np.stack(xs), *made)


WINDOW = micro_batches()
ALL_ROWS = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), WINDOW)
EXACT = problems.exact(PARAMS, ALL_ROWS)
TOKENS = WINDOW["weights"].sum()
LOSS = np.float64(problems.linear_loss(PARAMS, ALL_ROWS)[0]) / TOKENS


def rows_of(device: int) -> Any:
    """The rows of one of the devices, of all micro-batches."""
    own = slice(2 * device, 2 * device + 2)
    return jax.tree.map(lambda x: x[:, own].reshape(-1, *x.shape[2:]), WINDOW)


MEANS = [problems.exact(PARAMS, rows_of(i))["w"] for i in range(DEVICES) if i != 2]
assert relative_error(np.mean(MEANS, 0), EXACT["w"]) > 1e-2


def mapped(f: Any, *, in_specs: Any, out_specs: Any = WHOLE, **options: Any) -> Any:
    mesh = options.pop("mesh", None) or make_mesh((DEVICES,))
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    )


def check(got: Any) -> None:
    (loss, (num_tokens, _)), gradient = got
    assert relative_error(gradient, EXACT) < 1e-6
    assert num_tokens == TOKENS
    np.testing.assert_allclose(loss, LOSS, rtol=1e-6)


def reduced(loss_fn: Any, name: str = "data") -> Any:
    """Each by itself: jax 0.8.1 cannot differentiate the sum of several."""
    return lambda *args: tuple(jax.lax.psum(x, name) for x in loss_fn(*args))


@pytest.mark.parametrize(("way", "check_vma"), [("loss", False), ("gradients", True)])
def test_parameters_of_each_device_get_the_gradient_over_its_rows(
    way: str, check_vma: bool
):
    """Without marked types, results are those of each device, too.

    The gradient over all rows is then reduced once a window.
    """

    def f(params: Any, window: Any) -> Any:
        params = {"w": as_varying(params["w"], ["data"])} if check_vma else params
        got = WAYS[way](problems.linear_loss)(params, window)
        (loss, (n, _)), gradient = got
        total = jax.lax.psum(n, "data")
        of_all = [jax.lax.psum(x * n, "data") / total for x in (loss, gradient["w"])]
        return jax.tree.map(lambda x: x[None], got), (of_all[0], total, of_all[1])

    specs = P("data"), P()
    options = {"out_specs": specs, "check_vma": check_vma}
    over = mapped(f, in_specs=(P(), ROW_SPEC), **options)
    program = over.lower(PARAMS, WINDOW).compile()
    assert helpers.bytes_sent(program) == PARAMS["w"].nbytes + 2 * 4
    got, (loss, total, gradient) = program(PARAMS, WINDOW)
    check(((loss, (total, None)), {"w": gradient}))
    (_, (tokens, _)), gradients = got
    for device in range(DEVICES):
        rows = rows_of(device)
        assert tokens[device] == rows["weights"].sum()
        if tokens[device]:
            expected = problems.exact(PARAMS, rows)["w"]
            assert relative_error(gradients["w"][device], expected) < 1e-6
        else:
            assert not gradients["w"][device].any()


def test_everything_that_a_window_takes():
    """Along the other axis everything is the same, and is not added up again."""

    def loss_fn(params: Any, batch: Any, *, rng: Any, scale: Any) -> Any:
        loss_sum, n = reduced(problems.linear_loss)(params, batch)
        loss_sum += 0 * jax.random.uniform(rng)
        return scale * loss_sum, (n, {"rows": batch["x"][:, 0], "missing": None})

    def f(params: Any, window: Any, rng: Any, number: Any) -> Any:
        options = {"rng": rng, "num_micro_batches": number, "scale": jnp.ones(())}
        return window_value_and_grad(loss_fn, has_aux=True)(params, window, **options)

    mesh, seen = make_mesh((4, 2), "explicit"), {"rows": ROW_SPEC, "missing": None}
    in_specs, out_specs = (P(), ROW_SPEC, P(), P()), ((P(), (P(), seen)), P())
    over = mapped(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    window = jax.device_put(WINDOW, NamedSharding(mesh, ROW_SPEC))
    for number in (K, 1):
        got = over(PARAMS, window, jax.random.key(0), np.asarray(number))
        (_, (num_tokens, aux)), gradient = got
        runs = np.repeat(np.arange(K) < number, ROWS).reshape(K, ROWS)
        rows = ALL_ROWS | {"weights": (WINDOW["weights"] * runs).ravel()}
        assert num_tokens == rows["weights"].sum()
        assert relative_error(gradient, problems.exact(PARAMS, rows)) < 1e-6
        np.testing.assert_array_equal(aux["rows"], WINDOW["x"][:, :, 0] * runs)


BOTH = "must return both the loss and num_tokens reduced"


@pytest.mark.parametrize(
    ("way", "one"),
    [("loss", "neither"), ("loss", "loss"), ("gradients", "num_tokens")],
)
def test_unless_loss_and_count_are_reduced_it_raises(way: str, one: str):
    def loss_fn(params: Any, batch: Any) -> Any:
        given = problems.linear_loss(params, batch)
        pairs = zip(["loss", "num_tokens"], given, strict=True)
        return tuple(jax.lax.psum(x, "data") if n == one else x for n, x in pairs)

    with pytest.raises(ValueError, match=BOTH):
        mapped(WAYS[way](loss_fn), in_specs=(P(), ROW_SPEC)).lower(PARAMS, WINDOW)


def gathered(params: Any, batch: Any) -> Any:
    """A loss of which every device has a part of the parameter."""
    whole = jax.lax.all_gather(params["w"], "model", tiled=True)
    return problems.linear_loss({"w": whole}, batch)


@pytest.mark.slow
@pytest.mark.needs(devices=4)
def test_parts_of_parameters_that_the_loss_gathers():
    parts, rows = {"w": P("model")}, P(None, "model")
    types = (TYPES["auto"],)
    mesh = jax.make_mesh((4,), ("model",), types, devices=jax.devices()[:4])
    specs = {"in_specs": (parts, rows), "out_specs": (WHOLE, parts)}

    of_all = window_value_and_grad(reduced(gathered, "model"))
    check(mapped(of_all, mesh=mesh, **specs)(PARAMS, WINDOW))
    with pytest.raises(ValueError, match=BOTH):
        of_part = window_value_and_grad(gathered)
        mapped(of_part, mesh=mesh, **specs).lower(PARAMS, WINDOW)


def all_to_all(x: Any) -> Any:
    """The rows of all devices."""
    copies = jnp.tile(x, (DEVICES, 1))
    return jax.lax.all_to_all(copies, "data", 0, 0, tiled=True)


def attention(keys_of: Any) -> Any:
    """A loss of rows that attend to the rows of all devices."""

    def loss_fn(params: Any, batch: Any) -> Any:
        keys = keys_of(batch["x"] * params["w"])
        seen = jax.nn.softmax(batch["x"] @ keys.T) @ keys
        losses = (seen.sum(-1) - batch["y"]) ** 2
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    return loss_fn


@pytest.mark.parametrize("way", ["loss", helpers.slow("gradients")])
def test_a_device_without_tokens_keeps_the_gradients_that_others_send_it(way: str):
    """In 0.3.0, they were lost unless loss and count came reduced."""

    def mean(params: Any) -> Any:
        batches = [jax.tree.map(lambda x, i=i: x[i], WINDOW) for i in range(K)]
        loss_sums, counts = zip(
            *(attention(lambda x: x)(params, batch) for batch in batches), strict=True
        )
        return sum(loss_sums) / sum(counts)

    loss_fn = attention(all_to_all)
    f = mapped(WAYS[way](reduced(loss_fn)), in_specs=(P(), ROW_SPEC))
    (loss, (num_tokens, _)), gradient = f(PARAMS, WINDOW)
    expected = jax.jit(jax.value_and_grad(mean))(PARAMS)
    assert num_tokens == TOKENS
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert relative_error(gradient, expected[1]) < 1e-6

    def on_each(params: Any, window: Any, differ: bool = False) -> Any:
        if differ:
            params = {"w": as_varying(params["w"], ["data"])}
        return jax.tree.map(lambda x: x[None], WAYS[way](loss_fn)(params, window))

    cases = [(True, False), (True, True), *[(False, False)] * (way == "loss")]
    for check_vma, differ in cases:
        f = mapped(
            functools.partial(on_each, differ=differ),
            in_specs=(P(), ROW_SPEC),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        with pytest.raises(ValueError, match=BOTH):
            f.lower(PARAMS, WINDOW)
