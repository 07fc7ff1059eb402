"""Windows in a `shard_map` of the caller's, whose types tell what differs."""

import re
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import nnx_ways
import numpy as np
import problems
import pytest
from helpers import relative_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh
from problems import PARAMS

from optax_tokenaccum import accumulate_over_window, window_value_and_grad
from optax_tokenaccum import nnx as nnx_steps
from optax_tokenaccum._core.trees import as_varying

K, ROWS, DEVICES = 3, 16, 8
ROW_SPEC = P(None, "data")
MUST = "must return both the loss and num_tokens reduced"


def of_gradients(loss_fn: Any) -> Any:
    return accumulate_over_window(jax.value_and_grad(loss_fn, has_aux=True))


WAYS = {"loss": window_value_and_grad, "gradients": of_gradients}
# Devices have few tokens, many, and device 2 none; micro-batch 1 has none at all.
WEIGHTS = np.linspace(0, 9, ROWS).round() * [[1], [0], [1]]
WEIGHTS[:, 4:6] = 0
MICRO_BATCHES = [problems.batch_of(i, w) for i, w in enumerate(WEIGHTS)]
WINDOW = helpers.stack(MICRO_BATCHES)


def rows_of(device: int) -> list[Any]:
    """The rows of one of the devices, of all micro-batches."""
    return [helpers.cut(x, DEVICES)[device] for x in MICRO_BATCHES]


EXACT = problems.exact(PARAMS, *MICRO_BATCHES)
MEANS = [problems.exact(PARAMS, *rows_of(i))["w"] for i in range(DEVICES) if i != 2]
assert relative_error(np.mean(MEANS, 0), EXACT["w"]) > 1e-2


def mapped(f: Any, **options: Any) -> Any:
    specs = {"in_specs": (P(), ROW_SPEC), "out_specs": P()}
    options = {"mesh": make_mesh((DEVICES,))} | specs | options
    return jax.jit(jax.shard_map(f, **options))


def check(got: Any, loss_fn: Any = problems.linear_loss) -> None:
    """The gradient and loss of all rows, in one program without devices."""

    def mean(params: Any) -> Any:
        found = [loss_fn(params, batch) for batch in MICRO_BATCHES]
        return sum(x for x, _ in found) / sum(n for _, n in found)

    (loss, (num_tokens, _)), gradient = got
    expected = jax.jit(jax.value_and_grad(mean))(PARAMS)
    assert num_tokens == WEIGHTS.sum()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert relative_error(gradient, expected[1]) < 1e-6


def reduced(loss_fn: Any, axis: str = "data") -> Any:
    """Each by itself: jax 0.8.1 cannot differentiate the sum of several."""
    return lambda *args: tuple(jax.lax.psum(x, axis) for x in loss_fn(*args))


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

    over = mapped(f, out_specs=(P("data"), P()), check_vma=check_vma)
    program = over.lower(PARAMS, WINDOW).compile()
    assert helpers.bytes_sent(program) == PARAMS["w"].nbytes + 2 * 4
    got, (loss, total, gradient) = program(PARAMS, WINDOW)
    check(((loss, (total, None)), {"w": gradient}))
    (_, (tokens, _)), gradients = got
    for device in range(DEVICES):
        rows = rows_of(device)
        assert tokens[device] == sum(x["weights"].sum() for x in rows)
        if tokens[device]:
            expected = problems.exact(PARAMS, *rows)["w"]
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
        assert num_tokens == WEIGHTS[:number].sum()
        expected = problems.exact(PARAMS, *MICRO_BATCHES[:number])
        assert relative_error(gradient, expected) < 1e-6
        rows = WINDOW["x"][:, :, 0] * (np.arange(K) < number)[:, None]
        np.testing.assert_array_equal(aux["rows"], rows)


@pytest.mark.parametrize(
    ("way", "one"),
    [("loss", "neither"), ("loss", "loss"), ("gradients", "num_tokens")],
)
def test_unless_loss_and_count_are_reduced_it_raises(way: str, one: str):
    def loss_fn(params: Any, batch: Any) -> Any:
        given = problems.linear_loss(params, batch)
        pairs = zip(["loss", "num_tokens"], given, strict=True)
        return tuple(jax.lax.psum(x, "data") if n == one else x for n, x in pairs)

    with pytest.raises(ValueError, match=MUST):
        mapped(WAYS[way](loss_fn)).lower(PARAMS, WINDOW)


@pytest.mark.slow
@pytest.mark.needs(devices=4)
def test_parts_of_parameters_that_the_loss_gathers():
    def gathered(params: Any, batch: Any) -> Any:
        whole = jax.lax.all_gather(params["w"], "model", tiled=True)
        return problems.linear_loss({"w": whole}, batch)

    parts, types = {"w": P("model")}, (TYPES["auto"],)
    mesh = jax.make_mesh((4,), ("model",), types, devices=jax.devices()[:4])
    specs = {"in_specs": (parts, P(None, "model")), "out_specs": (P(), parts)}
    of_all = window_value_and_grad(reduced(gathered, "model"))
    check(mapped(of_all, mesh=mesh, **specs)(PARAMS, WINDOW))
    with pytest.raises(ValueError, match=MUST):
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
        return problems.squares(seen.sum(-1), batch)

    return loss_fn


@pytest.mark.parametrize("way", ["loss", helpers.slow("gradients")])
def test_a_device_without_tokens_keeps_the_gradients_that_others_send_it(way: str):
    """In 0.3.0, they were lost unless loss and count came reduced."""
    loss_fn = attention(all_to_all)
    got = mapped(WAYS[way](reduced(loss_fn)))(PARAMS, WINDOW)
    check(got, attention(lambda x: x))
    for check_vma, differ in (True, False), (True, True), (False, False):
        if way == "gradients" and not check_vma:
            continue

        def on_each(params: Any, window: Any, differ: bool = differ) -> Any:
            params = {"w": as_varying(params["w"], ["data"])} if differ else params
            return jax.tree.map(lambda x: x[None], WAYS[way](loss_fn)(params, window))

        f = mapped(on_each, out_specs=P("data"), check_vma=check_vma)
        with pytest.raises(ValueError, match=MUST):
            f.lower(PARAMS, WINDOW)


def anchors(params: Any, batch: Any) -> Any:
    """A loss of all rows, whose count is that of rows with a weight."""
    losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(losses), jnp.sum(batch["weights"])


def anchors_of_model(model: Any, batch: Any) -> Any:
    return anchors(model.params(), batch)


def of_model(reduction: Any) -> Any:
    f = nnx_steps.window_value_and_grad(anchors_of_model, reduction=reduction)

    def value_and_grad(params: Any, window: Any) -> Any:
        model = nnx_ways.Holder(params)
        values, grads = f(model, window)
        return values, model.structure.unflatten(jax.tree.leaves(grads))

    return value_and_grad


FUNCTIONS = {
    "loss": lambda reduction: window_value_and_grad(anchors, reduction=reduction),
    "gradients": lambda reduction: accumulate_over_window(
        jax.value_and_grad(anchors, has_aux=True), reduction=reduction
    ),
    "model": of_model,
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_sums_keep_the_real_loss_of_a_device_without_tokens(way: str):
    """The function of the page on devices; means times counts lose that loss."""
    page = (Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^def mean_over_devices.*?^$", page, re.DOTALL | re.MULTILINE)

    def varying(params: Any) -> Any:
        return jax.tree.map(lambda x: as_varying(x, ["data"]), params)

    names = {
        "jax": jax,
        "jnp": jnp,
        "loss_fn": anchors,
        "varying": varying,
        "window_value_and_grad": lambda _, reduction: FUNCTIONS[way](reduction),
    }
    exec(code, names)

    def by_means(params: Any, window: Any) -> Any:
        params = varying(params)
        (loss, (n, _)), grads = FUNCTIONS[way]("mean")(params, window)
        total = jax.lax.psum(n, "data")
        return total, *jax.tree.map(
            lambda x: jax.lax.psum(n * x, "data") / total, (loss, grads)
        )

    for f, is_exact in ((names["mean_over_devices"], True), (by_means, False)):
        n, loss, gradient = mapped(f)(PARAMS, WINDOW)
        if is_exact:
            check(((loss, (n, None)), gradient), anchors)
        else:
            with pytest.raises(AssertionError):
                check(((loss, (n, None)), gradient), anchors)


@pytest.mark.parametrize("way", FUNCTIONS)
def test_sums_are_not_divided_and_in_float32(way: str):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    (loss_sum, (n, _)), sums = FUNCTIONS[way]("sum")(params, WINDOW)
    (mean, _), gradient = FUNCTIONS[way]("mean")(params, WINDOW)
    assert sums["w"].dtype == jnp.float32 and gradient["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(loss_sum / n, mean, rtol=1e-6)
    found = (sums["w"] / n).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, gradient["w"])
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'"):
        FUNCTIONS[way]("total")


@pytest.mark.skipif(not hasattr(jax.sharding, "no_collectives"), reason="jax 0.12")
def test_within_a_window_nothing_is_reduced():
    """A reduction in a loss, in every micro-batch, is an error while it is traced."""

    def window_of(loss_fn: Any) -> Any:
        def over_devices(params: Any, window: Any) -> Any:
            params = jax.tree.map(lambda x: as_varying(x, ["data"]), params)
            with jax.sharding.no_collectives({"data"}):
                f = window_value_and_grad(loss_fn, reduction="sum")
                (loss, (n, _)), sums = f(params, window)
            loss, n, sums = jax.lax.psum((loss, n, sums), "data")
            mean = jax.tree.map(lambda x: x / n, (loss, sums))
            return (mean[0], (n, None)), mean[1]

        return mapped(over_devices)(PARAMS, WINDOW)

    def reduced(params: Any, batch: Any) -> Any:
        return jax.lax.psum(problems.linear_loss(params, batch), "data")

    check(window_of(problems.linear_loss))
    with pytest.raises(Exception, match="forbidden by `no_collectives`"):
        window_of(reduced)
