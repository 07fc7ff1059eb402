"""Windows in a `shard_map` of the caller's, whose types tell what differs."""

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
from ways_in import PARAMS

from optax_tokenaccum import window_value_and_grad
from optax_tokenaccum._core.trees import as_varying

K, ROWS, DEVICES = 3, 16, 8
WHOLE, ROW_SPEC = P(), P(None, "data")


WAYS = {"loss": window_value_and_grad, "gradients": ways_in.of_gradients}


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


def reduced(loss_fn: Any, name: str = "data") -> Any:
    """Each by itself: jax 0.8.1 cannot differentiate the sum of several."""
    return lambda *args: tuple(jax.lax.psum(x, name) for x in loss_fn(*args))


@pytest.mark.parametrize(
    ("way", "shape", "kind", "reduces"),
    [
        ("loss", (8,), "auto", None),
        ("gradients", (8,), "explicit", None),
        # Along the other axis everything is the same, and is not added up again.
        ("loss", (4, 2), "explicit", None),
        ("loss", (8,), "auto", reduced(ways_in.loss_fn)),
        ("gradients", (4, 2), "auto", reduced(ways_in.loss_fn)),
    ],
)
def test_parameters_of_all_devices_get_the_gradient_over_all_rows(
    way: str, shape: tuple[int, ...], kind: str, reduces: Any
):
    mesh, loss_fn = make_mesh(shape, kind), reduces or ways_in.loss_fn
    f = mapped(WAYS[way](loss_fn), mesh=mesh, in_specs=(P(), ROW_SPEC))
    check(f(PARAMS, jax.device_put(WINDOW, NamedSharding(mesh, ROW_SPEC))))


def test_one_reduction_of_gradients_for_all_micro_batches():
    f = mapped(window_value_and_grad(ways_in.loss_fn), in_specs=(P(), ROW_SPEC))
    program = f.lower(PARAMS, WINDOW).compile()
    assert helpers.bytes_sent(program) == 4 * 4 + 2 * 4


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
        params = {"w": as_varying(params["w"], ["data"])} if check_vma else params
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


@pytest.mark.parametrize("one", ["loss", "num_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_only_one_of_loss_and_count_reduced_raises(way: str, one: str):
    def loss_fn(params: Any, batch: Any) -> Any:
        given = ways_in.loss_fn(params, batch)
        pairs = zip(["loss", "num_tokens"], given, strict=True)
        return tuple(jax.lax.psum(x, "data") if n == one else x for n, x in pairs)

    with pytest.raises(ValueError, match=f"'data' and a {one} that does not"):
        mapped(WAYS[way](loss_fn), in_specs=(P(), ROW_SPEC)).lower(PARAMS, WINDOW)


def test_a_count_that_is_equal_on_all_devices():
    def loss_fn(params: Any, batch: Any) -> Any:
        return ways_in.loss_fn(params, batch)[0], len(batch["x"])

    f = mapped(window_value_and_grad(loss_fn), in_specs=(P(), ROW_SPEC))
    (_, (num_tokens, _)), gradient = f(PARAMS, WINDOW)
    assert num_tokens == K * ROWS
    expected = EXACT["w"] * (TOKENS / num_tokens)
    assert relative_error(gradient["w"], expected) < 1e-6


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

    of_all = WAYS[way](reduced(gathered, "model"))
    check(mapped(of_all, mesh=mesh, **specs)(PARAMS, WINDOW))
    with pytest.raises(ValueError, match="must reduce the loss and num_tokens"):
        mapped(WAYS[way](gathered), mesh=mesh, **specs).lower(PARAMS, WINDOW)
