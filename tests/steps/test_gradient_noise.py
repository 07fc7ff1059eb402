"""The noise of windows: exact for each window, unbiased over many, and free."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    make_window_step,
    regroup_sums,
)

K, ROWS, DEVICES = 4, 32, 8
SGD = optax.sgd(0.0)
MESH = meshes.make_mesh((DEVICES,))
OPTIONS: dict[str, dict[str, Any]] = {
    "one device": {},
    "sums apart": {"mesh": MESH, "data_axes": "data"},
    "sum over all": {"mesh": MESH, "data_axes": "data", "reduce_every": "micro_batch"},
}


def linear_loss_fn(params: Any, batch: Any) -> Any:
    """Its gradient for a token is `params - x`."""
    losses = jnp.sum((params["w"] - batch["x"]) ** 2, -1) / 2
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def window_of(seed: int, dim: int = 3) -> list[dict[str, np.ndarray]]:
    """Micro-batches with different numbers of tokens; some rows have none."""
    rng = np.random.default_rng(seed)
    x = rng.normal(1, 3, (K, ROWS, dim)).astype(np.float32)
    mask = rng.uniform(size=(K, ROWS)) < rng.uniform(0.2, 0.9, (K, 1))
    return [{"x": x[i], "mask": mask[i].astype(np.float32)} for i in range(K)]


def new_step(way: str, options: Any, k: int = K, **more: Any) -> Any:
    options = {"gradient_noise": True} | options | more
    loss_fn = options.pop("loss_fn", linear_loss_fn)
    if way in nnx_ways.WAYS:
        return nnx_ways.make_step(way, loss_fn, SGD, k, **options)
    if way == "window":
        return make_window_step(loss_fn, SGD, **options)
    return helpers.new_train_step(way, loss_fn, SGD, k, **options)


def run(way: str, step: Any, state: Any, window: list[Any], **kwargs: Any) -> Any:
    batches = [helpers.stack(window)] if "window" in way else window
    return helpers.run_step(step, state, batches, **kwargs)


def sums_of(micro_batch: Any) -> tuple[np.ndarray, float]:
    """The summed gradient at 0 and the tokens, in float64."""
    mask = np.float64(micro_batch["mask"])
    return -(np.float64(micro_batch["x"]) * mask[:, None]).sum(0), mask.sum()


def expected(
    window: list[Any], by_device: bool, devices: int = DEVICES
) -> tuple[float, float]:
    """From the normal equations of E |G|^2 / n = n |g|^2 + tr S."""
    whole = [np.sum(x, 0) for x in zip(*map(sums_of, window), strict=True)]
    if not by_device:
        first = next(sums for sums in map(sums_of, window) if sums[1])
        counts = np.array([first[1], whole[1]])
        squares = np.array([g @ g / n for g, n in (first, whole)])
        squared_norm, trace = np.linalg.solve(np.c_[counts, [1, 1]], squares)
        return trace, squared_norm
    rows = np.arange(ROWS).reshape(devices, -1)
    parts = []
    for own in rows:
        cut = [{name: x[own] for name, x in batch.items()} for batch in window]
        parts.append([np.sum(x, 0) for x in zip(*map(sums_of, cut), strict=True)])
    within = sum(g @ g / n for g, n in parts if n)
    across = whole[0] @ whole[0] / whole[1]
    trace = (within - across) / (sum(n > 0 for _, n in parts) - 1)
    return trace, (across - trace) / whole[1]


def assert_noise(metrics: Any, window: list[Any], by_device: bool) -> None:
    assert metrics.updated
    got = jax.device_get(metrics.gradient_noise)
    if by_device or len(window) > 1:
        np.testing.assert_allclose(got, expected(window, by_device), rtol=1e-4)
        assert got.scale == got.trace / got.squared_norm
    else:
        assert np.isnan(got).all()


@pytest.mark.parametrize("devices", OPTIONS)
@pytest.mark.parametrize("way", meshes.ALL_WAYS)
def test_a_window_has_the_noise_of_its_norms(way: str, devices: str):
    """Also where it is partial, begins without tokens, or a device has none."""
    step, by_device = new_step(way, OPTIONS[devices]), devices == "sums apart"
    state, window = step.init({"w": jnp.zeros(3)}), window_of(0)
    state, metrics = run(way, step, state, window)
    assert_noise(metrics, window, by_device)
    other = expected(window, not by_device)
    assert not np.allclose(metrics.gradient_noise, other, rtol=0.01)
    # The first device has no tokens in this window, and does not count.
    others = [x | {"mask": x["mask"] * (np.arange(ROWS) >= 4)} for x in window_of(1)]
    empty = others[0] | {"mask": 0 * others[0]["mask"]}
    state, metrics = run(way, step, state, [empty, *others[1:]])
    assert_noise(metrics, others[1:], by_device)
    for size in (3, 1):  # what the window before left is not counted
        if "window" in way:
            state, metrics = run(way, step, state, window, num_micro_batches=size)
        else:
            state, metrics = run(way, step, state, window[:size])
            assert np.isnan(metrics.gradient_noise).all()
            state, metrics = step.close_window(state)
        assert_noise(metrics, window[:size], by_device)


@pytest.mark.parametrize(
    ("way", "devices"),
    [
        ("one program", "one device"),
        ("one program", "sums apart"),
        ("window", "one device"),
        ("window", "sum over all"),
    ],
)
def test_rejected_micro_batches_do_not_count(way: str, devices: str):
    first, *others = window_of(1)
    skips = {"should_skip_update_fn": optax.skip_not_finite}
    step = new_step(way, OPTIONS[devices], k=len(others), **skips)
    bad = first | {"x": first["x"] + np.nan}
    _, metrics = run(way, step, step.init({"w": jnp.zeros(3)}), [bad, *others])
    assert_noise(metrics, others, devices == "sums apart")


@pytest.mark.slow
def test_unbiased_where_counts_vary_a_hundred_times():
    dim, windows, k = 512, 4000, 8

    def sum_of_normals(params: Any, batch: Any) -> Any:
        """Its gradient is the sum of `n` normal vectors, with means of 0.05."""
        n, x = batch["n"], batch["x"]
        return jnp.sum(params["w"] * (0.05 * n + jnp.sqrt(n) * x)), n

    step = new_step("window", {}, k, loss_fn=sum_of_normals)

    def run_window(state: Any, key: jax.Array) -> Any:
        size, values = jax.random.split(key)
        n = jnp.floor(10 ** jax.random.uniform(size, (k,), minval=0, maxval=2))
        window = {"n": n, "x": jax.random.normal(values, (k, dim))}
        state, metrics = step(state, window)
        return state, metrics.gradient_noise

    keys = jax.random.split(jax.random.key(0), windows)
    state = step.init({"w": jnp.zeros(dim)})
    _, noise = jax.jit(lambda state: jax.lax.scan(run_window, state, keys))(state)
    standard_errors = np.nanstd(noise, axis=1) / windows**0.5
    true = np.array([dim, dim * 0.05**2])
    assert (3 * standard_errors < 0.02 * true).all()
    np.testing.assert_allclose(np.nanmean(noise, axis=1), true, rtol=0.02)


@pytest.mark.parametrize("devices", [4, 1])
def test_an_open_window_on_other_devices(devices: int):
    """Groups of devices are parts too; on one device nothing is known."""
    window = window_of(3)
    old = new_step("two programs", OPTIONS["sums apart"])
    state = old.init({"w": jnp.zeros(3)})
    for batch in window[:2]:
        state, _ = old(state, batch)
    mesh = jax.sharding.Mesh(jax.devices()[:devices], "data")
    options = {"mesh": mesh, "data_axes": "data"} if devices > 1 else {}
    step = new_step("two programs", options)
    state = regroup_sums(jax.device_get(state), step.init({"w": jnp.zeros(3)}))
    for batch in window[2:]:
        state, metrics = step(state, batch)
    got = jax.device_get(metrics.gradient_noise)
    if devices == 1:
        assert np.isnan(got).all()
    else:
        wanted = expected(window, by_device=True, devices=devices)
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("devices", ["one device", "sums apart"])
def test_a_window_that_was_open_without_it_has_unknown_noise(devices: str):
    window, options = window_of(4), OPTIONS[devices]
    old = new_step("two programs", options | {"gradient_noise": False})
    state, metrics = old(old.init({"w": jnp.zeros(3)}), window[0])
    assert state.opt_state.skip_state == () and metrics.gradient_noise is None
    step = new_step("two programs", options)
    with pytest.raises(ValueError, match="regroup_sums"):
        step(state, window[1])
    state = regroup_sums(state, step.init({"w": jnp.zeros(3)}))
    for i in range(2):
        for batch in window[1 - i :]:
            state, metrics = step(state, batch)
        assert metrics.updated
        assert np.isnan(metrics.gradient_noise).all() == (i == 0)
    # A step without it forgets a window, so that the next step does not mix two.
    state, _ = step(state, window[0])
    state, _ = old(state, window[1])
    for batch in window[2:]:
        state, metrics = step(state, batch)
    assert metrics.updated and np.isnan(metrics.gradient_noise).all()


@pytest.mark.parametrize(
    ("way", "devices"),
    [
        ("two programs", "one device"),
        ("two programs", "sums apart"),
        ("window", "sum over all"),
    ],
)
def test_no_buffer_of_the_size_of_the_parameters(way: str, devices: str):
    params = {"layers": jnp.zeros((24, 64, 64))}

    def scanned_loss_fn(params: Any, x: jax.Array) -> Any:
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.sum(y), y.size

    def temporaries(on: bool) -> np.ndarray:
        step = new_step(
            way, OPTIONS[devices], loss_fn=scanned_loss_fn, gradient_noise=on
        )
        state, x = step.init(params), jnp.zeros((16, 64))
        if way == "window":
            programs = [step.lower(state, helpers.stack([x] * K))]
        else:
            programs = [step.accumulate.lower(state, x), step.close_window.lower(state)]
        memory = [program.compile().memory_analysis() for program in programs]
        return np.array([x.temp_size_in_bytes for x in memory])

    assert (temporaries(True) - temporaries(False) < 4096).all()
