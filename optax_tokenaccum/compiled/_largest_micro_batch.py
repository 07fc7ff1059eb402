"""Finds the largest micro-batch that fits into the memory of a device."""

import itertools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from optax_tokenaccum._core import checks
from optax_tokenaccum._steps.compile_ahead import (
    Lowering,
    Programs,
    distinct_batches,
    signature,
)
from optax_tokenaccum.compiled._memory import memory

# A trial compiles a program for every shape in the list of `batch_of`.
TRIALS = 5
# The part of a device's memory that is left to fragmentation and to other libraries.
MARGIN = 0.05


class MicroBatchFit(NamedTuple):
    """The result of `largest_micro_batch`.

    Attributes:
      size: the largest size that fits.
      peak_bytes: the most that a device holds, with micro-batches of this size.
      limit_bytes: the most that it may hold.

    Example:
      >>> from optax_tokenaccum.compiled import MicroBatchFit
      >>> fit = MicroBatchFit(size=24, peak_bytes=15_000_000, limit_bytes=16_000_000)
      >>> print(f"{fit.size} rows use {fit.peak_bytes / fit.limit_bytes:.0%}")
      24 rows use 94%
    """

    size: int
    peak_bytes: int
    limit_bytes: int


def largest_micro_batch(
    step: Any,
    state: Any,
    batch_of: Callable[[int], Iterable[Any]],
    *,
    limit_bytes: int | None = None,
    multiple_of: int = 1,
    **kwargs: Any,
) -> MicroBatchFit:
    """Finds the largest micro-batch that fits, together with all that a run keeps.

    It compiles the step's programs and reads what they need, see `memory`. It runs
    none of them, so it never runs out of memory. Counted is all that a device holds
    while each program runs: parameters, optimizer state, sums, the micro-batch,
    temporaries, the metrics of the call before, and in the update the micro-batch that
    came before with its metrics, and the sums without it if the step does not donate
    them. Arrays that `loss_fn` closes over are not counted: give them as keywords.

    At most five sizes are compiled, each for all shapes that `batch_of` returns; their
    memory predicts that of others. The result is one of them, so it fits. It is the
    largest if memory grows evenly with the size, as it does with the number of rows. A
    compiler for a GPU or a TPU may compute values twice to stay below the memory of the
    device; then there may be gaps below the result.

    The largest micro-batch is not always the fastest: time a few sizes up to it.

    Args:
      step: from `make_train_step` or `make_window_step`, or from the functions of the
        same names for NNX. It must be the step of the run: a token budget or a skip
        function makes other programs.
      state: the state of the run, or `step.init(shapes)` of the parameters' shapes, on
        several devices with their shardings: `jax.eval_shape(step.init, params)` drops
        them. For NNX, `(model, optimizer)`, which may be abstract.
      batch_of: returns, for a size, the list of all batches of the run, or better of
        their shapes, which need no memory: for example one for each bucket of
        `plan_window`, where the size is `max_tokens`. For a window step, whole windows.
      limit_bytes: the memory of a device for all of this. By default it is what the
        device says that it has, less 5 %, less what it holds besides `state` and the
        keywords: give the state itself if it exists. A CPU does not tell.
      multiple_of: sizes are multiples of this number, such as the number of devices
        that share a batch, or the longest bucket.
      **kwargs: the keywords of a call of the step: `rng`, and those of `loss_fn`.

    Returns:
      A `MicroBatchFit`.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: not even the smallest micro-batch fits; `limit_bytes` must be given;
        or batches do not grow with the size.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> from optax_tokenaccum.compiled import largest_micro_batch
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params) ** 2), len(x)
      >>> step = make_train_step(loss_fn, optax.adamw(1e-3), 8)
      >>> state = step.init(jax.ShapeDtypeStruct((512, 512), jnp.float32))
      >>> def batch_of(rows):
      ...     return [jax.ShapeDtypeStruct((rows, 512), jnp.float32)]
      >>> fit = largest_micro_batch(step, state, batch_of, limit_bytes=8_000_000)
      >>> 0.99 < fit.peak_bytes / fit.limit_bytes <= 1
      True
    """
    if not hasattr(step, "_programs"):
        raise TypeError(
            "step must be from make_train_step or make_window_step, of "
            f"optax_tokenaccum or of optax_tokenaccum.nnx: got {type(step).__name__}."
        )
    if not callable(batch_of):
        raise TypeError(
            "batch_of must be a function of a size that returns a list of batches: got "
            f"{type(batch_of).__name__}. Write largest_micro_batch(step, state, "
            "batch_of)."
        )
    multiple_of = checks.as_count(multiple_of, "multiple_of")
    is_number = isinstance(limit_bytes, numbers.Real) and math.isfinite(limit_bytes)
    if limit_bytes is not None and (isinstance(limit_bytes, bool) or not is_number):
        raise TypeError(f"limit_bytes must be a number of bytes: got {limit_bytes!r}.")
    programs: Programs = step._programs(state, **kwargs)
    counted = programs.state, kwargs
    limit = _free_bytes(counted) if limit_bytes is None else int(limit_bytes)
    sizes: dict[Any, int] = {}

    def batches_of(n: int) -> list[Any]:
        size = n * multiple_of
        batches = distinct_batches(batch_of(size), "What batch_of returns")
        if not batches:
            raise ValueError(f"batch_of must return a batch: got none for size {size}.")
        other = sizes.setdefault(signature(batches), size)
        if other != size:
            raise ValueError(
                "batch_of must return larger batches for larger sizes: got the same "
                f"shapes for {min(other, size)} and {max(other, size)}. Where rows are "
                "max_tokens // length, make multiple_of the longest length. A shape is "
                "a jax.ShapeDtypeStruct."
            )
        return batches

    for n in (1, 2):
        batches_of(n)
    state_bytes = _bytes_of(programs.state)
    peaks: dict[int, float] = {0: state_bytes}
    trial: int | None = 2
    while trial is not None and len(peaks) <= TRIALS:
        try:
            peaks[trial] = _peak(programs, batches_of(trial))
        except Exception as error:
            error.add_note(
                f"largest_micro_batch tried a batch of size {trial * multiple_of}. "
                f"Sizes are multiples of multiple_of={multiple_of}."
            )
            raise
        trial = _next_trial(peaks, limit)
    largest = max((n for n, peak in peaks.items() if n and peak <= limit), default=None)
    if largest is None:
        needed = f"{peaks[1]:,} bytes" if math.isfinite(peaks[1]) else "more"
        raise ValueError(
            f"A micro-batch must fit into {limit:,} bytes: one of size {multiple_of} "
            f"needs {needed}, of which {state_bytes:,} are the state. Spread the state "
            "over devices, use jax.checkpoint, or make rows shorter."
        )
    return MicroBatchFit(largest * multiple_of, int(peaks[largest]), limit)


def _next_trial(peaks: dict[int, float], limit: int) -> int | None:
    """The size to try next, or `None` when the largest that fits is known.

    Between two sizes, and beyond them, memory is taken to grow by the same amount for
    each unit of size. `peaks` has the memory of the state as that of size 0, and an
    infinite one for sizes whose programs do not compile.
    """
    low = max(n for n, peak in peaks.items() if n == 0 or peak <= limit)
    high = min((n for n in peaks if n > low), default=None)
    if high is not None and high <= low + 2:  # 2 is the first trial
        return low + 1 if high == low + 2 else None
    before = max(n for n in peaks if n < low)
    other = before if high is None or math.isinf(peaks[high]) else high
    slope = (peaks[low] - peaks[other]) / (low - other)
    guess = low + math.floor((limit - peaks[low]) / slope) if slope > 0 else 4 * low
    if high is not None and guess >= high:
        guess = (low + high) // 2
    return max(guess, low + 1)


class _Held(NamedTuple):
    """What a device holds while a program runs, in bytes."""

    peak: int  # with the state that is not among the arguments, without the code
    code: int
    batch: int  # the arguments that are not of the state; 0 for the update
    metrics: int  # the results that are not of the state
    copied: int  # the state that it returns anew, because none is donated


def _peak(programs: Programs, batches: list[Any]) -> float:
    """The most that a device holds; infinite if a program does not compile.

    JAX compiles a program once, although each size asks for those of the update again.
    """
    lowerings = map(programs.for_batch, batches), (make() for make in programs.others)
    try:
        held = [_held(x, programs.state) for x in itertools.chain(*lowerings)]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf
    # The update runs while the loop holds the micro-batch that came before. In the same
    # call, the old state and the metrics of the micro-batch are held, too.
    waiting = max(x.batch for x in held)
    if programs.in_one_call:
        waiting += max(x.metrics + x.copied for x in held if x.batch)
    # A loop keeps the metrics, with `aux`, while the next program runs.
    kept = max(x.metrics for x in held) + sum(x.code for x in held)
    return kept + max(x.peak + (0 if x.batch else waiting) for x in held)


def _held(lowering: Lowering, state: Any) -> _Held:
    arguments, of_state = (
        {id(x): x for x in jax.tree.leaves(tree)}
        for tree in (lowering.arguments, state)
    )
    compiled = lowering.lowered.compile()
    report = memory(compiled)
    returned, *results = compiled.out_info
    is_donated = any(x.donated for x in jax.tree.leaves(compiled.args_info))
    besides = _bytes_of([x for key, x in of_state.items() if key not in arguments])
    return _Held(
        peak=report.peak - report.code + besides,
        code=report.code,
        batch=_bytes_of([x for key, x in arguments.items() if key not in of_state]),
        metrics=_bytes_of(results),
        copied=0 if is_donated else _bytes_of(returned),
    )


def _bytes_of(tree: Any) -> int:
    """Bytes on one device, of arrays or their shapes."""
    num_bytes = 0
    for x in jax.tree.leaves(tree):
        kind, sharding = jax.typeof(x), getattr(x, "sharding", None)
        shape = sharding.shard_shape(kind.shape) if sharding else kind.shape
        num_bytes += math.prod(shape) * kind.dtype.itemsize
    return num_bytes


def _free_bytes(counted: Any) -> int:
    """What the devices have for the arrays that are counted, and for all else."""
    arrays = [x for x in jax.tree.leaves(counted) if isinstance(x, jax.Array)]
    devices = {device for x in arrays for device in x.sharding.addressable_devices}
    found = [x.memory_stats() for x in devices or jax.local_devices()[:1]]
    if not all(found):
        raise ValueError(
            "limit_bytes must be given: got None, and the device does not tell its "
            "memory, as a CPU never does."
        )
    return min(_free(stats, _bytes_of(arrays)) for stats in found if stats)


def _free(stats: dict[str, int], own: int) -> int:
    others = max(stats["bytes_in_use"] - own, 0)
    return int((1 - MARGIN) * stats["bytes_limit"]) - others
