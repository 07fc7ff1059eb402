"""What is measured: every function is a case, and returns rows of a table."""

import functools
import gc
import math
import platform
import subprocess
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_tokenaccum
from benchmarks import ahead, fits
from benchmarks.measure import interleaved, ratios, relative_error, spread
from benchmarks.nnx_loop import nnx_train_step
from benchmarks.report import RESULTS, Rows, stored
from benchmarks.speed import BASE, RATE, gradient_errors, run_one
from benchmarks.ways import WAYS, Loop, size_in_bytes
from benchmarks.workloads import (
    Workload,
    as_window,
    stacked_layers,
    window_of,
)

K = ahead.K
NNX = "nnx train step"
UNTIMED = "gradients alone", "gradient by hand"
TIMED = (*(x for x in WAYS if x not in UNTIMED), NNX)
EXACT = "float32", "bfloat16", "unrolled", "tied embedding"
# Layers x width. A GPU waits for the host, if a model is small; so fewer methods.
SMALL = "4 x 256", "12 x 1024", "24 x 2048"
SMALL_BASE = "scan by hand"
TIMED_SMALL = SMALL_BASE, *ahead.STEPS, "optax.MultiSteps", "MultiSteps"


def environment(small: bool) -> Rows:
    """The device and the versions."""
    device = jax.devices()[0]
    modules = optax_tokenaccum, jax, optax, flax, np
    row = {x.__name__: x.__version__ for x in modules}
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
    dtype = jnp.bfloat16 if model == "bfloat16" else jnp.float32
    workload = stacked_layers(*sizes, words, stored=dtype, scanned=model != "unrolled")
    plain = window_of(workload, 4)
    first, second, *others = plain.micro_batches
    empty = as_window([first, second | {"mask": second["mask"] & False}, *others])
    methods = {name: way.build for name, way in WAYS.items() if way.exact is not None}
    methods[NNX] = nnx_train_step
    found: dict[str, dict[str, float]] = {}

    def loops(names: Any, k: int, **skips: Any) -> dict[str, Loop]:
        return {x: methods[x](workload, optax.sgd(RATE), k, **skips) for x in names}

    with jax.default_matmul_precision("highest"):
        compiled = loops(methods, 4)
        for name, window in (("plain", plain), ("empty", empty)):
            compiled |= loops([NNX], 4)  # whose model is trained already
            found[name] = gradient_errors(workload, compiled, window, window)
        if not words:
            broken = as_window([first, second | {"x": second["x"] * np.nan}, *others])
            skipping = loops(
                ahead.STEPS, 3, should_skip_update_fn=optax.skip_not_finite
            )
            rest = as_window([first, *others])
            found["NaN"] = gradient_errors(workload, skipping, broken, rest)
    limit = 1e-5 if dtype == jnp.float32 else 2.0**-7
    rows = []
    for method in methods:
        errors = {what: own.get(method) for what, own in found.items()}
        exact = all(x is None or x < limit for x in errors.values())
        rows.append({"model": model, "method": method, "exact": exact} | errors)
    return rows


def precision(small: bool) -> Rows:
    """Errors of a window's gradient if float32 products have the default precision.

    A GPU then rounds their factors to TF32.
    """
    workload = stacked_layers(*(32, 2, 2, 16) if small else (256, 4, 4, 128))
    params, window = workload.params, window_of(workload, 4)
    whole = jax.jit(jax.grad(workload.mean_loss_fn, has_aux=True))
    loop = WAYS["train step"].build(workload, optax.sgd(RATE), 4)
    after, *_ = loop.run(loop.init(params), window)
    ours = jax.tree.map(lambda a, b: (a - b) / RATE, params, after)
    default, _ = whole(params, window.whole, {})
    with jax.default_matmul_precision("highest"):
        highest, _ = whole(params, window.whole, {})
    pairs = {
        "train step, from the full batch": (ours, default),
        "full batch, from that in the highest precision": (default, highest),
    }
    return [{"gradient": x, "error": relative_error(*y)} for x, y in pairs.items()]


def memory(small: bool, model: str, method: str, rows: Any = 1) -> Rows:
    """What a window needs besides parameters, optimizer state and batches, in MB.

    `XLA says` is its figure for the largest program. `ran` is the most that the device
    held, if that is more than it held while the state was made.
    """
    workload, inner = problem(small, model, int(rows))
    loop, window = WAYS[method].build(workload, inner, K), window_of(workload, K)
    if method in ahead.STEPS:  # these take shapes themselves
        shapes = loop.init(workload.params)
    else:
        shapes = jax.eval_shape(loop.init, workload.params)
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
    for compiled in stored(RESULTS / "ahead/benchmarks.json")["ahead"]["rows"]:
        names = compiled.get("layout"), compiled.get("model"), compiled.get("way")
        if names == (ahead.ONE, model, method) and "optimizer" not in compiled:
            row["compiled ahead for an H200"] = compiled["H200 MB"]
    return [row]


def timing(small: bool, model: str) -> Rows:
    """Windows of a model; each begins with a state of its own, made before."""
    is_decoder = model == "decoder"
    methods, base = (TIMED, BASE) if is_decoder else (TIMED_SMALL, SMALL_BASE)
    workload, inner = problem(small, model, 2)
    params, window = noise(workload.params), window_of(workload, K)
    build = {name: way.build for name, way in WAYS.items()} | {NNX: nnx_train_step}
    loops = {method: build[method](workload, inner, K) for method in methods}
    states: dict[str, Any] = {}

    def prepare(method: str) -> None:
        states.clear()
        gc.collect()
        states[method] = loops[method].init(params)
        jax.block_until_ready(jax.tree.leaves(states))

    run = functools.partial(run_one, loops, states, window)
    runs = {method: functools.partial(run, method) for method in methods}
    rounds, seconds = (11, 90) if is_decoder else (31, 30)
    rounds = 1 if small else rounds
    times = interleaved(runs, rounds=rounds, seconds=seconds, prepare=prepare)
    over_base = ratios(times, base)
    tokens = math.prod(jax.tree.leaves(window.whole)[0].shape[:2])
    return [
        {
            "model": model,
            "method": method,
            "ms": (ms := spread([1e3 * x for x in own])),
            f"of {base}": over_base[method],
            "tokens/s": round(1e3 * tokens / ms.median),
        }
        for method, own in times.items()
    ]


CASES = {f.__name__: f for f in (environment, exact, precision, memory, timing)}


def stat(name: str) -> int:
    """A number of bytes about the device's memory; 0 on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get(name, 0)


def problem(small: bool, model: str, rows: int) -> tuple[Workload, Any]:
    """A workload with shapes in the place of parameters, and its optimizer.

    Args:
      small: whether it is tiny.
      model: `"decoder"`, with 0.8 billion parameters, one of the ahead suite, or
        layers x width.
      rows: of a micro-batch.
    """
    if model == "decoder":
        of = fits.Model(24, 1536, 4096, 12, 32_000)
        of = fits.Model(2, 32, 64, 2, 64, jnp.float32) if small else of
        return decoder(of, rows, 16 if small else 1024), optax.adamw(1e-4)
    made, inner = [], ahead.SGD
    sizes = (4, 64, 32, 128) if small else ahead.SIZES
    if " x " in model:
        own = (2, 32) if small else map(int, model.split(" x "))
        sizes, model, inner = (*own, *sizes[2:]), "float32", optax.adamw(1e-4)

    def params() -> Any:
        made.append(ahead.models(*sizes)[model](rows=rows))
        return made[0].params

    shapes = jax.eval_shape(params)
    return made[0]._replace(params=shapes), inner


def decoder(model: fits.Model, rows: int, length: int) -> Workload:
    """The decoder of `benchmarks.fits`; rows have random numbers of loss tokens."""
    placed = fits.params_of(model, jax.make_mesh((1, 1), ("data", "model")), False)

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        return fits.loss_fn(model, None, params, batch)

    def micro_batch(rng: np.random.Generator) -> Any:
        tokens = rng.integers(0, model.vocabulary, (rows, length + 1)).astype(np.int32)
        is_counted = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
        labels = np.where(is_counted, tokens[:, 1:], -1)
        return {"tokens": tokens[:, :-1], "labels": labels}

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed)
    return Workload(shapes, {}, loss_fn, micro_batch)


@functools.partial(jax.jit, static_argnums=0)
def _noise(x: jax.ShapeDtypeStruct) -> jax.Array:
    bits = jax.lax.iota(np.uint32, x.size) * np.uint32(2654435761)
    bits = (bits ^ bits >> 15) * np.uint32(0x2C1B3C6D)
    values = bits.reshape(x.shape).astype(np.float32) / 2.0**31 - 1
    return (x.shape[-2] ** -0.5 * values).astype(x.dtype)


def noise(shapes: Any) -> Any:
    """Parameters that need no other memory, as `jax.random` does."""
    return jax.tree.map(_noise, shapes)
