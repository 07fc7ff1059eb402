"""Windows in a `shard_map` of the caller's, whose types tell what differs."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ways_in
from helpers import relative_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh
from ragged_windows import PADS, ragged_window
from ways_in import PARAMS

from optax_tokenaccum import (
    accumulate_over_window,
    collectives,
    pad_window,
    window_value_and_grad,
)
from optax_tokenaccum._core.trees import as_varying

K, ROWS, DEVICES = 3, 16, 8
WHOLE, ROW_SPEC = P(), P(None, "data")
GRAD_FN = jax.value_and_grad(ways_in.loss_fn, has_aux=True)


def by_gradients(loss_fn: Any, **options: Any) -> Any:
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    return accumulate_over_window(grad_fn, **options)


WAYS = {"loss": window_value_and_grad, "gradients": by_gradients}


def micro_batches() -> Any:
    """Micro-batches whose devices have few tokens, many, and none at all."""
    weights = np.linspace(0, 9, ROWS).round() * np.ones((K, ROWS))
    weights[:, 4:6] = weights[1] = 0
    made = [ways_in.batch_of(i, w) for i, w in enumerate(weights)]
    return jax.tree.map(lambda *xs: np.stack(xs), *made)


WINDOW = micro_batches()
ALL_ROWS = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), WINDOW)
EXACT = ways_in.exact(PARAMS, ALL_ROWS)
TOKENS = WINDOW["weights"].sum()
LOSS = np.float64(ways_in.loss_fn(PARAMS, ALL_ROWS)[0]) / TOKENS


def rows_of(device: int) -> Any:
    """The rows of one of the devices, of all micro-batches."""
    own = slice(2 * device, 2 * device + 2)
    return jax.tree.map(lambda x: x[:, own].reshape(-1, *x.shape[2:]), WINDOW)


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


def own(tree: Any) -> Any:
    return jax.tree.map(lambda x: as_varying(x, ["data"]), tree)


def reduced(given: Any, name: str = "data") -> Any:
    """Each by itself: jax 0.8.1 cannot differentiate the sum of several."""
    return jax.tree.map(lambda x: jax.lax.psum(x, name), given)


@pytest.mark.parametrize(
    ("way", "shape", "kind", "reduces"),
    [
        ("loss", (8,), "auto", False),
        ("gradients", (8,), "explicit", False),
        # Along the other axis everything is the same, and is not added up again.
        ("loss", (4, 2), "explicit", False),
        ("gradients", (4, 2), "auto", False),
        ("loss", (8,), "auto", True),
        ("gradients", (8,), "auto", True),
    ],
)
def test_parameters_of_all_devices_get_the_gradient_over_all_rows(
    way: str, shape: tuple[int, ...], kind: str, reduces: bool
):
    def loss_fn(params: Any, batch: Any) -> Any:
        given = ways_in.loss_fn(params, batch)
        return reduced(given) if reduces else given

    mesh = make_mesh(shape, kind)
    f = mapped(WAYS[way](loss_fn), mesh=mesh, in_specs=(P(), ROW_SPEC))
    check(f(PARAMS, jax.device_put(WINDOW, NamedSharding(mesh, ROW_SPEC))))


def test_one_reduction_of_gradients_for_all_micro_batches():
    f = mapped(window_value_and_grad(ways_in.loss_fn), in_specs=(P(), ROW_SPEC))
    report = collectives(f.lower(PARAMS, WINDOW).compile())
    assert report.bytes(kind="all-reduce") == 4 * 4 + 2 * 4


def test_the_mean_over_devices_of_their_means_is_another_gradient():
    means = [ways_in.exact(PARAMS, rows_of(i))["w"] for i in range(DEVICES) if i != 2]
    assert relative_error(np.mean(means, 0), EXACT["w"]) > 1e-2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_each_device_get_the_gradient_over_its_rows(
    way: str, check_vma: bool
):
    """Without marked types, results are those of each device, too."""

    def f(params: Any, window: Any) -> Any:
        params = own(params) if check_vma else params
        got = WAYS[way](ways_in.loss_fn)(params, window)
        (loss, (n, _)), gradient = got
        total = jax.lax.psum(n, "data")
        of_all = [jax.lax.psum(x * n, "data") / total for x in (loss, gradient["w"])]
        return jax.tree.map(lambda x: x[None], got), (of_all[0], total, of_all[1])

    specs = P("data"), P()
    options = {"out_specs": specs, "check_vma": check_vma}
    over = mapped(f, in_specs=(P(), ROW_SPEC), **options)
    got, (loss, total, gradient) = over(PARAMS, WINDOW)
    check(((loss, (total, None)), {"w": gradient}))
    (_, (tokens, _)), gradients = got
    for device in range(DEVICES):
        rows = rows_of(device)
        assert tokens[device] == rows["weights"].sum()
        if tokens[device]:
            expected = ways_in.exact(PARAMS, rows)["w"]
            assert relative_error(gradients["w"][device], expected) < 1e-6
        else:
            assert not gradients["w"][device].any()


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_a_window_takes(way: str):
    def loss_fn(params: Any, batch: Any, *, rng: Any, scale: Any) -> Any:
        loss_sum, n = ways_in.loss_fn(params, batch)
        loss_sum += 0 * jax.random.uniform(rng)
        return scale * loss_sum, (n, {"rows": batch["x"][:, 0], "missing": None})

    def f(params: Any, window: Any, rng: Any, numbers: Any) -> Any:
        options = {"rng": rng, "num_micro_batches": numbers[0], "scale": jnp.ones(())}
        return WAYS[way](loss_fn, has_aux=True)(params, window, **options)

    seen = {"rows": ROW_SPEC, "missing": None}
    in_specs, out_specs = (P(), ROW_SPEC, P(), P("data")), ((P(), (P(), seen)), P())
    over = mapped(f, in_specs=in_specs, out_specs=out_specs)
    # Where gradients wait for the end of the window, devices may have other numbers.
    others = [3, 3, 1, 0, 2, 3, 1, 3] if way == "loss" else [1] * DEVICES
    for numbers in map(np.asarray, ([K] * DEVICES, others)):
        got = over(PARAMS, WINDOW, jax.random.key(0), numbers)
        (_, (num_tokens, aux)), gradient = got
        runs = np.arange(K)[:, None] < np.repeat(numbers, 2)
        rows = ALL_ROWS | {"weights": (WINDOW["weights"] * runs).ravel()}
        assert num_tokens == rows["weights"].sum()
        assert relative_error(gradient, ways_in.exact(PARAMS, rows)) < 1e-6
        np.testing.assert_array_equal(aux["rows"], WINDOW["x"][:, :, 0] * runs)
        if runs.all():
            check(got)


def test_several_losses_have_denominators_over_all_devices():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, _ = ways_in.loss_fn(params, batch)
        return {"a": loss_sum, "b": jnp.sum((batch["x"] @ params["w"]) ** 2)}

    def count_fn(batch: Any) -> Any:
        return {"a": jnp.sum(batch["weights"]), "b": len(batch["x"])}

    f = window_value_and_grad(loss_fn, count_fn=count_fn)
    (loss, (counts, _)), gradient = mapped(f, in_specs=(P(), ROW_SPEC))(PARAMS, WINDOW)
    ones = ALL_ROWS | {"y": 0 * ALL_ROWS["y"], "weights": np.ones(K * ROWS)}
    second = ways_in.exact(PARAMS, ones)["w"]
    assert counts == {"a": TOKENS, "b": K * ROWS}
    assert relative_error(gradient["w"], EXACT["w"] + second) < 1e-6
    squares = np.mean((ALL_ROWS["x"] @ np.float64(PARAMS["w"])) ** 2)
    np.testing.assert_allclose(loss, LOSS + squares, rtol=1e-6)


def test_a_planned_window():
    batch, sequences = ragged_window(0)
    params = helpers.init_params(0)
    cut = {"max_tokens": 512, "length_buckets": [24, 64], "batch_multiple": DEVICES}
    window = pad_window(sequences, pad_values=PADS, **cut)
    rows = jax.tree.map(lambda _: ROW_SPEC, window.micro_batches)
    specs = dataclasses.replace(window, micro_batches=rows, counts=P())
    f = mapped(window_value_and_grad(helpers.loss_sum_fn), in_specs=(P(), specs))
    (_, (num_tokens, _)), gradient = f(params, window)
    assert num_tokens == batch["mask"].sum()
    expected = helpers.float64_gradient(params, batch)
    assert relative_error(gradient, expected) < helpers.RTOL["float32"]


@pytest.mark.parametrize("one", ["loss", "num_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_only_one_of_loss_and_count_reduced_raises(way: str, one: str):
    def loss_fn(params: Any, batch: Any) -> Any:
        given = ways_in.loss_fn(params, batch)
        pairs = zip(["loss", "num_tokens"], given, strict=True)
        return tuple(jax.lax.psum(x, "data") if n == one else x for n, x in pairs)

    with pytest.raises(ValueError, match=f"'data' and a {one} that does not"):
        mapped(WAYS[way](loss_fn), in_specs=(P(), ROW_SPEC)).lower(PARAMS, WINDOW)


@pytest.mark.parametrize(("way", "is_number"), [("loss", True), ("gradients", False)])
def test_a_count_that_is_equal_on_all_devices(way: str, is_number: bool):
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, _ = ways_in.loss_fn(params, batch)
        rows = len(batch["x"])
        return loss_sum, rows if is_number else own(jnp.asarray(rows))

    f = mapped(WAYS[way](loss_fn), in_specs=(P(), ROW_SPEC))
    (_, (num_tokens, _)), gradient = f(PARAMS, WINDOW)
    assert num_tokens == K * ROWS
    expected = EXACT["w"] * (TOKENS / num_tokens)
    assert relative_error(gradient["w"], expected) < 1e-6


@jax.custom_vjp
def scaled(x: Any, largest: Any) -> Any:
    """Returns `x`; the "gradient" of `largest` is its next value."""
    return x


scaled.defvjp(lambda x, _: (x, jnp.abs(x).max()), lambda res, g: (g, res))


def test_parameters_of_which_each_device_has_some_and_a_value_to_be_overwritten():
    """All are divided by the tokens of all devices; of the value there is one."""
    own, name = np.arange(DEVICES, dtype=np.float32), "_overwrite_with_gradient"
    params = PARAMS | {"own": own, name: jnp.zeros(())}

    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = scaled(batch["x"], params[name]), batch["y"] - params["own"]
        return ways_in.loss_fn(params, batch | {"x": x, "y": y})

    specs = {"w": P(), "own": P("data"), name: P()}
    f = window_value_and_grad(loss_fn)
    over = mapped(f, in_specs=(specs, ROW_SPEC), out_specs=(P(), specs))
    (_, (num_tokens, _)), gradient = over(params, WINDOW)
    shifted = ALL_ROWS | {"y": ALL_ROWS["y"] - np.tile(np.repeat(own, 2), K)}
    errors = shifted["x"] @ np.float64(PARAMS["w"]) - shifted["y"]
    per_row = (2 * errors * shifted["weights"]).reshape(K, DEVICES, 2)
    assert num_tokens == TOKENS
    assert relative_error(gradient["w"], ways_in.exact(PARAMS, shifted)["w"]) < 1e-6
    assert relative_error(gradient["own"], per_row.sum((0, 2)) / TOKENS) < 1e-6
    with_tokens = WINDOW["x"][[0, 2]]  # the second micro-batch has none
    assert gradient[name] == np.abs(with_tokens).max()  # over all devices


def test_a_gradient_function_is_given_the_parameters_as_they_are():
    """What it clips is the gradient that it would have clipped without a window."""

    def clipped(params: Any, batch: Any) -> Any:
        value, gradient = GRAD_FN(params, batch)
        return value, jax.tree.map(lambda g: jnp.clip(g, -10, 10), gradient)

    f = mapped(accumulate_over_window(clipped), in_specs=(P(), ROW_SPEC))
    _, gradient = f(PARAMS, WINDOW)
    parts = [jax.tree.map(lambda x, i=i: x[i], WINDOW) for i in range(K)]
    sums = [ways_in.exact(PARAMS, x)["w"] * x["weights"].sum() for x in parts[::2]]
    expected = np.clip(sums, -10, 10).sum(0) / TOKENS
    assert relative_error(gradient["w"], expected) < 1e-6


def test_gradients_of_means_need_parameters_of_each_device():
    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = ways_in.loss_fn(params, batch)
        return loss_sum / n, n

    grad_fn = jax.value_and_grad(mean_fn, has_aux=True)
    window = accumulate_over_window(grad_fn, gradients="mean")
    with pytest.raises(ValueError, match="needs the gradients of each device"):
        mapped(window, in_specs=(P(), ROW_SPEC)).lower(PARAMS, WINDOW)


def gathered(params: Any, batch: Any) -> Any:
    """A loss of which every device has a part of the parameter."""
    whole = jax.lax.all_gather(params["w"], "model", tiled=True)
    return ways_in.loss_fn({"w": whole}, batch)


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_parameters_that_the_loss_gathers(way: str):
    parts, rows = {"w": P("model")}, P(None, "model")
    types = (TYPES["auto"],)
    mesh = jax.make_mesh((4,), ("model",), types, devices=jax.devices()[:4])
    specs = {"in_specs": (parts, rows), "out_specs": (WHOLE, parts)}

    def reduces(params: Any, batch: Any) -> Any:
        return reduced(gathered(params, batch), "model")

    check(mapped(WAYS[way](reduces), mesh=mesh, **specs)(PARAMS, WINDOW))
    with pytest.raises(ValueError, match="must reduce the loss and num_tokens"):
        mapped(WAYS[way](gathered), mesh=mesh, **specs).lower(PARAMS, WINDOW)
