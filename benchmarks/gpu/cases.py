"""What is measured: every function is a case, and returns rows of a table."""

import functools
import gc
import json
import platform
import subprocess
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.ahead import ONE, STEPS
from benchmarks.gpu.workloads import noise, problem, stat
from benchmarks.loops import Loop, size_in_bytes
from benchmarks.measure import interleaved, ratios, relative_error, spread
from benchmarks.nnx_loop import nnx_train_step
from benchmarks.page import RESULTS
from benchmarks.report import Rows
from benchmarks.speed import RATE, gradient_errors
from benchmarks.ways import WAYS
from benchmarks.workloads import (
    Window,
    as_window,
    stacked_layers,
    transformer_of,
    window_of,
)

K = 8  # micro-batches in a window
BASE, NNX = "gradients + one step", "nnx train step"
UNTIMED = "gradients alone", "gradient by hand"
TIMED = (*(x for x in WAYS if x not in UNTIMED), NNX)
EXACT = "float32", "bfloat16", "unrolled", "tied embedding"
TRAINED = "optax.MultiSteps", "scan by hand", "MultiSteps", "train step", "window step"
TRIALS = 5


def environment(small: bool) -> Rows:
    """The device and the versions."""
    device = jax.devices()[0]
    row = {x.__name__: x.__version__ for x in (jax, optax, flax, np)}
    row |= {"python": platform.python_version(), "device": device.device_kind}
    row["platform"] = device.client.platform_version.replace("\n", " ")
    if not small:
        ask = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        row["driver"] = subprocess.run(ask, capture_output=True, text=True).stdout[:-1]
    return [row | {"GB for jax": stat("bytes_limit") / 1e9}]


def exact(small: bool, model: str) -> Rows:
    """Errors of every method's gradient, relative to sums in float64.

    In a window that is `empty`, one of four micro-batches has no tokens. In one with
    `NaN`, the steps reject one. Computation is in float32; parameters of `bfloat16` are
    in that dtype, and so are gradients.
    """
    sizes = (32, 2, 2, 16) if small else (256, 4, 4, 128)
    words = 2048 if model == "tied embedding" else 0
    stored = jnp.bfloat16 if model == "bfloat16" else jnp.float32
    workload = stacked_layers(*sizes, words, stored=stored, scanned=model != "unrolled")
    plain = window_of(workload, 4)
    first, second, *others = plain.micro_batches
    empty = as_window([first, second | {"mask": second["mask"] & False}, *others])
    methods = {name: way.build for name, way in WAYS.items() if way.kind != "limit"}
    methods[NNX] = nnx_train_step
    found: dict[str, dict[str, float]] = {}

    def compare(window: Window, names: Any = methods, same_as: Any = (), **skips: Any):
        k = len((same_as or window).micro_batches)
        inner = optax.sgd(RATE)
        loops = {x: methods[x](workload, inner, k, **skips) for x in names}
        return gradient_errors(workload, loops, window, same_as or window)

    with jax.default_matmul_precision("highest"):
        found["plain"], found["empty"] = compare(plain), compare(empty)
        if not words:
            broken = as_window([first, second | {"x": second["x"] * np.nan}, *others])
            skips = {"should_skip_update_fn": optax.skip_not_finite}
            found["NaN"] = compare(broken, STEPS, as_window([first, *others]), **skips)
    limit = 1e-5 if stored == jnp.float32 else 2.0**-7
    rows = []
    for method in methods:
        errors = {what: own.get(method) for what, own in found.items()}
        exact = all(x is None or x < limit for x in errors.values())
        rows.append({"model": model, "method": method, "exact": exact} | errors)
    return rows


def memory(small: bool, model: str, method: str, rows: Any = 1, k: int = K) -> Rows:
    """What a window needs besides parameters, optimizer state and batches, in MB.

    `XLA says` is its figure for the largest program. `ran` is the most that the device
    held, if that is more than it held while the state was made.
    """
    workload, inner = problem(small, model, int(rows))
    loop, window = WAYS[method].build(workload, inner, k), window_of(workload, k)
    shapes = _state_shapes(method, loop, workload.params)
    said = max(x.peak() for x in loop.lower(shapes, window).values())
    inner_state = jax.eval_shape(inner.init, workload.params)
    sums = size_in_bytes(shapes) - size_in_bytes((workload.params, inner_state))
    # `loop.init` would hold the parameters twice.
    leaves = jax.tree.leaves(noise(workload.params))
    others = jax.tree.leaves(shapes)[len(leaves) :]
    leaves += [jnp.zeros(x.shape, x.dtype) for x in others]
    state = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    jax.block_until_ready(state)
    del leaves
    held, before = stat("bytes_in_use"), stat("peak_bytes_in_use")
    if method == "gradients alone":  # its loop holds the last one and computes one
        window = window._replace(micro_batches=window.micro_batches[:1])
    else:
        state = jax.block_until_ready(loop.run(state, window))
    state = jax.block_until_ready(loop.run(state, window))
    peak = stat("peak_bytes_in_use")
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state[0]))
    assert finite, "parameters must stay finite"
    ran = round((peak - held + max(sums, 0)) / 1e6) if peak > before else None
    row = {"model": model, "rows": int(rows), "method": method, "ran": ran}
    row |= {"XLA says": round(said / 1e6)}
    text = (RESULTS / "ahead/benchmarks.json").read_text()
    for stored in json.loads(text)["suites"]["ahead"]["rows"]:
        names = stored.get("layout"), stored.get("model"), stored.get("way")
        if names == (ONE, model, method) and "optimizer" not in stored:
            row["compiled ahead for an H200"] = stored["H200 MB"]
    return [row]


def _state_shapes(method: str, loop: Loop, params: Any) -> Any:
    if method in STEPS:  # these take shapes themselves
        return loop.init(params)
    return jax.eval_shape(loop.init, params)


def largest(small: bool, method: str) -> Rows:
    """The most rows of the large decoder that fit, by what XLA says of the programs.

    Two sizes predict a third one. Of at most five, the largest that fits is returned.
    """
    limit = 0.95 * (stat("bytes_limit") or 800_000)
    peaks: dict[int, float] = {}

    def fits(rows: int) -> bool:
        workload, inner = problem(small, "large decoder", rows)
        loop, window = WAYS[method].build(workload, inner, 2), window_of(workload, 1)
        kept = workload.params, jax.eval_shape(inner.init, workload.params)
        shapes = _state_shapes(method, loop, workload.params)
        peaks[rows] = size_in_bytes((kept, window.micro_batches))
        try:
            peaks[rows] += max(x.peak() for x in loop.lower(shapes, window).values())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            peaks[rows] = float("inf")
        return peaks[rows] <= limit

    if fits(1) and fits(2):
        rows = 2 + int((limit - peaks[2]) // max(peaks[2] - peaks[1], 1))
        while rows not in peaks and len(peaks) < TRIALS:
            rows += 1 if fits(rows) else -1
    rows = max((rows for rows, peak in peaks.items() if peak <= limit), default=0)
    found = {"method": method, "rows": rows, "of, GB": limit / 1e9}
    return [found | {"peak, GB": peaks.get(rows, 0) / 1e9}]


def fit(small: bool, method: str, rows: str) -> Rows:
    """Runs windows of two micro-batches of that many rows of the large decoder."""
    found: dict[str, Any] = {"method": method, "rows": int(rows), "fits": True}
    try:
        memory(small, "large decoder", method, rows, 2)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found["fits"] = False
    return [found | {"peak, GB": stat("peak_bytes_in_use") / 1e9}]


def timing(small: bool) -> Rows:
    """Windows of the decoder; each begins with a state of its own, made before."""
    workload, inner = problem(small, "decoder", 2)
    params, window = noise(workload.params), window_of(workload, K)
    build = {name: way.build for name, way in WAYS.items()} | {NNX: nnx_train_step}
    loops = {method: build[method](workload, inner, K) for method in TIMED}
    states: dict[str, Any] = {}

    def prepare(method: str) -> None:
        states.clear()
        gc.collect()
        states[method] = loops[method].init(params)
        jax.block_until_ready(jax.tree.leaves(states))

    def run(method: str) -> Any:
        states[method] = loops[method].run(states[method], window)
        return jax.tree.leaves(states)

    runs = {method: functools.partial(run, method) for method in TIMED}
    rounds = 1 if small else 11
    times = interleaved(runs, rounds=rounds, seconds=90, prepare=prepare)
    rows, length = window.whole["tokens"].shape
    layers, width, _ = workload.params["layers"]["query"].shape
    weights = sum(x.size for x in jax.tree.leaves(workload.params))
    weights -= workload.params["embedding"].size
    # What remat and masks compute does not count; a token sees half of its row.
    flop = rows * length * (6 * weights + 6 * layers * width * length)
    over_base, tokens = ratios(times, BASE), rows * length
    return [
        {
            "method": method,
            "ms": (ms := spread([1e3 * x for x in own])),
            f"of {BASE}": over_base[method],
            "tokens/s": round(1e3 * tokens / ms.median),
            "TFLOP/s": flop / ms.median / 1e9,
        }
        for method, own in times.items()
    ]


def train(small: bool) -> Rows:
    """Short runs with AdamW: last losses, and distances to the full batch's run."""
    sizes = (32, 2, 2, 8) if small else (256, 4, 4, 64)
    workload, inner = transformer_of(*sizes, stacked=True), optax.adamw(1e-3)
    windows = [window_of(workload, 8, seed) for seed in range(3 if small else 30)]
    mean_loss = jax.jit(lambda p, b: jnp.divide(*workload.loss_fn(p, b, {})))

    @jax.jit
    def full_batch(state: Any, window: Window) -> Any:
        params, opt_state = state
        gradient = jax.grad(mean_loss)(params, window.whole)
        updates, opt_state = inner.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    loops = {method: WAYS[method].build(workload, inner, 8) for method in TRAINED}
    loops["full batch"] = Loop(
        lambda params: (params, inner.init(params)), full_batch, lambda *_: {}
    )
    ends, losses = {}, {}
    with jax.default_matmul_precision("highest"):
        for method, loop in loops.items():
            state = loop.init(workload.params)
            for window in windows:
                losses[method] = float(mean_loss(state[0], window.whole))
                state = loop.run(state, window)
            ends[method] = jax.tree.map(lambda x: np.asarray(x, np.float64), state[0])
    return [
        {
            "method": method,
            "updates": len(windows),
            "distance": relative_error(ends[method], ends["full batch"]),
            "loss": losses[method],
        }
        for method in loops
    ]


CASES = {f.__name__: f for f in (environment, exact, memory, largest, fit)}
CASES |= {f.__name__: f for f in (timing, train)}
