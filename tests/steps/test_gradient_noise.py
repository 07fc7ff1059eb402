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
    GradientNoise,
    make_train_step,
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
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
TRAIN_WAYS = [way for way in meshes.ALL_WAYS if "window" not in str(way)]


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


def noise_of(way: str, step: Any, window: list[Any]) -> GradientNoise:
    state = step.init({"w": jnp.zeros(window[0]["x"].shape[-1])})
    if "window" in way:
        window = [helpers.stack(window)]
    for batch in window:
        state, metrics = step(state, batch)
    return jax.device_get(metrics.gradient_noise)


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


@EACH
@pytest.mark.parametrize("way", meshes.ALL_WAYS)
def test_a_window_has_the_noise_of_its_norms(way: str, options: Any):
    window = window_of(0)
    got = noise_of(way, new_step(way, options), window)
    by_device = options is OPTIONS["sums apart"]
    np.testing.assert_allclose(got, expected(window, by_device), rtol=1e-4)
    assert not np.allclose(got, expected(window, not by_device), rtol=0.01)
    assert got.scale == got.trace / got.squared_norm


@EACH
@pytest.mark.parametrize("way", meshes.ALL_WAYS)
def test_empty_and_rejected_micro_batches_do_not_count(way: str, options: Any):
    first, second, *others = window_of(1)
    bad = second | {"x": second["x"] + np.nan}
    empty = first | {"mask": 0 * first["mask"]}
    # The first device has no tokens in this window, and does not count.
    others = [x | {"mask": x["mask"] * (np.arange(ROWS) >= 4)} for x in others]
    skips = {"should_skip_update_fn": optax.skip_not_finite}
    step = new_step(way, options, k=len(others) + 1, **skips)
    got = noise_of(way, step, [bad, empty, *others])
    by_device = options is OPTIONS["sums apart"]
    np.testing.assert_allclose(got, expected(others, by_device), rtol=1e-4)


@EACH
@pytest.mark.parametrize("way", TRAIN_WAYS)
def test_partial_and_open_windows(way: str, options: Any):
    window, step = window_of(2), new_step(way, options)
    state = step.init({"w": jnp.zeros(3)})
    by_device = options is OPTIONS["sums apart"]
    # A window that was longer before leaves nothing behind.
    for size in (K, K - 1, 1):
        for batch in window[:size]:
            state, metrics = step(state, batch)
            assert np.isnan(metrics.gradient_noise).all() == (not metrics.updated)
        if size < K:
            state, metrics = step.close_window(state)
        got = jax.device_get(metrics.gradient_noise)
        if size > 1 or by_device:
            wanted = expected(window[:size], by_device)
            np.testing.assert_allclose(got, wanted, rtol=1e-4)
        else:
            assert np.isnan(got).all()


@pytest.mark.parametrize("way", ["one program", "window"])
def test_unbiased_where_counts_vary_a_hundred_times(way: str):
    dim, windows, k = 512, 4000, 8

    def sum_of_normals(params: Any, batch: Any) -> Any:
        """Its gradient is the sum of `n` normal vectors, with means of 0.05."""
        n, x = batch["n"], batch["x"]
        return jnp.sum(params["w"] * (0.05 * n + jnp.sqrt(n) * x)), n

    step = new_step(way, {}, k, loss_fn=sum_of_normals)

    def run_window(state: Any, key: jax.Array) -> Any:
        size, values = jax.random.split(key)
        n = jnp.floor(10 ** jax.random.uniform(size, (k,), minval=0, maxval=2))
        window = {"n": n, "x": jax.random.normal(values, (k, dim))}
        if way == "window":
            state, metrics = step(state, window)
            return state, metrics.gradient_noise
        state, metrics = jax.lax.scan(step, state, window)
        return state, jax.tree.map(lambda x: x[-1], metrics.gradient_noise)

    keys = jax.random.split(jax.random.key(0), windows)
    state = step.init({"w": jnp.zeros(dim)})
    _, noise = jax.jit(lambda state: jax.lax.scan(run_window, state, keys))(state)
    standard_errors = np.nanstd(noise, axis=1) / windows**0.5
    true = np.array([dim, dim * 0.05**2])
    assert (3 * standard_errors < 0.02 * true).all()
    np.testing.assert_allclose(np.nanmean(noise, axis=1), true, rtol=0.02)


@pytest.mark.parametrize("devices", [DEVICES, 4, 1])
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


@EACH
def test_a_window_that_was_open_without_it_has_unknown_noise(options: Any):
    window = window_of(4)
    old = new_step("two programs", options | {"gradient_noise": False})
    state, _ = old(old.init({"w": jnp.zeros(3)}), window[0])
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


@EACH
@pytest.mark.parametrize("way", ["two programs", "window"])
def test_no_buffer_of_the_size_of_the_parameters(way: str, options: Any):
    params = {"layers": jnp.zeros((24, 64, 64))}

    def scanned_loss_fn(params: Any, x: jax.Array) -> Any:
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.sum(y), y.size

    def temporaries(on: bool) -> np.ndarray:
        step = new_step(way, options, loss_fn=scanned_loss_fn, gradient_noise=on)
        state, x = step.init(params), jnp.zeros((16, 64))
        if way == "window":
            programs = [step.lower(state, helpers.stack([x] * K))]
        else:
            programs = [step.accumulate.lower(state, x), step.close_window.lower(state)]
        memory = [program.compile().memory_analysis() for program in programs]
        return np.array([x.temp_size_in_bytes for x in memory])

    assert (temporaries(True) - temporaries(False) < 4096).all()


def test_off_there_is_neither_state_nor_metric():
    step = make_train_step(linear_loss_fn, SGD, 2)
    state = step.init({"w": jnp.zeros(3)})
    state, metrics = step(state, window_of(0)[0])
    assert state.opt_state.skip_state == () and metrics.gradient_noise is None
