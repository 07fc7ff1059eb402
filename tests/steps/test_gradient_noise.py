"""The noise of windows: exact for each window, and free."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest

from optax_tokenaccum import regroup_sums

K, ROWS, DEVICES = meshes.K, 32, 8
MESH = meshes.make_mesh((DEVICES,))
PARAMS = {"w": jnp.zeros(3)}
OPTIONS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": None, "data_axes": None},
    "sums apart": {"mesh": MESH, "data_axes": "data"},
    "sum over all": {"mesh": MESH, "data_axes": "data", "reduce_every": "micro_batch"},
}


def linear_loss_fn(params: Any, batch: Any) -> Any:
    """Its gradient for a token is `params - x`."""
    losses = jnp.sum((params["w"] - batch["x"]) ** 2, -1) / 2
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def window_of(seed: int) -> list[dict[str, np.ndarray]]:
    """Micro-batches with different numbers of tokens; some rows have none."""
    rng = np.random.default_rng(seed)
    x = rng.normal(1, 3, (K, ROWS, 3)).astype(np.float32)
    mask = rng.uniform(size=(K, ROWS)) < rng.uniform(0.2, 0.9, (K, 1))
    return [{"x": x[i], "mask": mask[i].astype(np.float32)} for i in range(K)]


def new_step(way: str, devices: str, **options: Any) -> Any:
    options = {"gradient_noise": True, "loss_fn": linear_loss_fn} | options
    return meshes.make_step(way, optax.sgd(0.0), **(OPTIONS[devices] | options))


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
    step, by_device = new_step(way, devices), devices == "sums apart"
    state, window = step.init(PARAMS), window_of(0)
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


@pytest.mark.parametrize("devices", OPTIONS)
@pytest.mark.parametrize("way", ["one program", "window"])
def test_rejected_micro_batches_do_not_count(way: str, devices: str):
    first, *others = window_of(1)
    skips = {"should_skip_update_fn": optax.skip_not_finite}
    step = new_step(way, devices, k=len(others), **skips)
    bad = first | {"x": first["x"] + np.nan}
    _, metrics = run(way, step, step.init(PARAMS), [bad, *others])
    assert_noise(metrics, others, devices == "sums apart")


@pytest.mark.parametrize("devices", [4, 1])
def test_an_open_window_on_other_devices(devices: int):
    """Groups of devices are parts too; on one device nothing is known."""
    window = window_of(3)
    old = new_step("two programs", "sums apart")
    state, _ = helpers.run_step(old, old.init(PARAMS), window[:2])
    mesh = jax.sharding.Mesh(jax.devices()[:devices], "data")
    over = {"mesh": mesh} if devices > 1 else OPTIONS["one device"]
    step = new_step("two programs", "sums apart", **over)
    state = regroup_sums(jax.device_get(state), step.init(PARAMS))
    state, metrics = helpers.run_step(step, state, window[2:])
    got = jax.device_get(metrics.gradient_noise)
    if devices == 1:
        assert np.isnan(got).all()
    else:
        wanted = expected(window, by_device=True, devices=devices)
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("devices", ["one device", "sums apart"])
def test_a_window_that_was_open_without_it_has_unknown_noise(devices: str):
    window = window_of(4)
    old = new_step("two programs", devices, gradient_noise=False)
    state, metrics = old(old.init(PARAMS), window[0])
    assert state.opt_state.skip_state == () and metrics.gradient_noise is None
    step = new_step("two programs", devices)
    with pytest.raises(ValueError, match="regroup_sums"):
        step(state, window[1])
    state = regroup_sums(state, step.init(PARAMS))
    for i in range(2):
        state, metrics = helpers.run_step(step, state, window[1 - i :])
        assert metrics.updated
        assert np.isnan(metrics.gradient_noise).all() == (i == 0)
    # A step without it forgets a window, so that the next step does not mix two.
    state, _ = step(state, window[0])
    state, _ = old(state, window[1])
    state, metrics = helpers.run_step(step, state, window[2:])
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
        step = new_step(way, devices, loss_fn=scanned_loss_fn, gradient_noise=on)
        state, x = step.init(params), jnp.zeros((16, 64))
        if way == "window":
            programs = [step.lower(state, helpers.stack([x] * K))]
        else:
            programs = [step.accumulate.lower(state, x), step.close_window.lower(state)]
        memory = [program.compile().memory_analysis() for program in programs]
        return np.array([x.temp_size_in_bytes for x in memory])

    assert (temporaries(True) - temporaries(False) < 4096).all()
