"""Finds the largest micro-batch that fits into the memory of a device."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.trees import is_concrete
from optax_tokenaccum._steps.compile_ahead import (
    Lowering,
    Programs,
    distinct_batches,
    signature,
)
from optax_tokenaccum.compiled._largest_size import largest_size
from optax_tokenaccum.compiled._memory import MemoryReport, memory

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
    none of them, so it never runs out of memory. What a device holds is counted while
    each program runs: parameters, optimizer state, sums, the micro-batch, temporaries,
    the metrics of the call before, and in the update the micro-batch that came before
    with its metrics, and the sums without it if the step does not donate them. Arrays
    that `loss_fn` closes over are not: give them as keywords.

    The memory of a few sizes predicts that of others, so at most five sizes are
    compiled, each for all shapes that `batch_of` returns. The result is one of these,
    so it fits. It is the largest if memory grows evenly with the size, as it does with
    the number of rows. A compiler for a GPU or a TPU may compute values twice to stay
    below the memory of the device; then there may be gaps below the result.

    The largest micro-batch is not always the fastest: time a few sizes up to it.

    Args:
      step: from `make_train_step` or `make_window_step`, or from the functions of the
        same names for NNX. It must be the step of the run: a token budget or a skip
        function makes other programs.
      state: the state of the run, or its shapes, `jax.eval_shape(step.init, params)`;
        on several devices the state itself, or shapes with shardings. For NNX,
        `(model, optimizer)`.
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
      >>> state = jax.eval_shape(step.init, jnp.zeros((512, 512)))
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
    run = _Run(step._programs(state, **kwargs))
    counted = run.state, kwargs
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

    def peak_of(n: int) -> float:
        try:
            return run.peak(batches_of(n))
        except Exception as error:
            error.add_note(
                f"largest_micro_batch tried a batch of size {n * multiple_of}. Sizes "
                f"are multiples of multiple_of={multiple_of}."
            )
            raise

    peaks = largest_size(peak_of, limit, run.state_bytes, TRIALS)
    size = max((n for n, peak in peaks.items() if peak <= limit), default=None)
    if size is None:
        needed = f"{peaks[1]:,} bytes" if math.isfinite(peaks[1]) else "more"
        raise ValueError(
            f"A micro-batch must fit into {limit:,} bytes: one of size {multiple_of} "
            f"needs {needed}, of which {run.state_bytes:,} are the state. Spread the "
            "state over devices, use jax.checkpoint, or make rows shorter."
        )
    return MicroBatchFit(size * multiple_of, int(peaks[size]), limit)


class _Compiled(NamedTuple):
    """What a device holds while a program runs."""

    report: MemoryReport
    state: int  # bytes of the state that are not among the arguments
    batch: int  # bytes of the arguments that are not of the state
    metrics: int  # bytes of the results that are not of the state
    copied: int  # bytes of the arguments that it returns anew, because none is donated


class _Run:
    """The programs of a run, compiled once for each shape."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._of_shape: dict[Any, _Compiled | None] = {}
        self.state = programs.state
        self.state_bytes = _bytes_of(jax.tree.leaves(self.state))

    @functools.cached_property
    def _others(self) -> list[_Compiled | None]:
        return [self._compiled(lowering()) for lowering in self._programs.others]

    def peak(self, batches: list[Any]) -> float:
        """The most that a device holds; infinite if a program does not compile."""
        found = [self._of_batch(batch) for batch in batches]
        needs = [x for x in (*found, *self._others) if x is not None]
        if len(needs) < len(found) + len(self._others):
            return math.inf
        code = sum(x.report.code for x in needs)
        # The update runs while the loop holds the micro-batch that came before. In the
        # same call, the old state and the metrics of the micro-batch are held, too.
        held = max(x.batch for x in needs)
        if self._programs.in_one_call:
            held += max(x.metrics + x.copied for x in needs if x.batch)
        # A loop keeps the metrics, with `aux`, while the next program runs.
        metrics = max(x.metrics for x in needs)
        return (
            metrics
            + code
            + max(
                x.report.peak - x.report.code + x.state + (held if not x.batch else 0)
                for x in needs
            )
        )

    def _of_batch(self, batch: Any) -> _Compiled | None:
        key = signature(batch)
        if key not in self._of_shape:
            self._of_shape[key] = self._compiled(self._programs.for_batch(batch))
        return self._of_shape[key]

    def _compiled(self, lowering: Lowering) -> _Compiled | None:
        arguments = {id(x): x for x in jax.tree.leaves(lowering.arguments)}
        state = {id(x): x for x in jax.tree.leaves(self.state)}
        try:
            compiled = lowering.lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        state_info, *infos = lowering.lowered.out_info
        state_shardings, *shardings = compiled.output_shardings
        is_donated = any(x.donated for x in jax.tree.leaves(lowering.lowered.args_info))
        copies = state_info, state_shardings
        return _Compiled(
            memory(compiled),
            _bytes_of(x for key, x in state.items() if key not in arguments),
            _bytes_of(x for key, x in arguments.items() if key not in state),
            sum(map(_size_of, *map(jax.tree.leaves, (infos, shardings)))),
            0 if is_donated else sum(map(_size_of, *map(jax.tree.leaves, copies))),
        )


def _bytes_of(arrays: Iterable[Any]) -> int:
    """Bytes on one device, of arrays or their shapes."""
    return sum(map(_size_of, arrays))


def _size_of(x: Any, sharding: Any = None) -> int:
    sharding = sharding or getattr(x, "sharding", None)
    if not hasattr(x, "shape"):
        x = jax.typeof(x)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _free_bytes(counted: Any) -> int:
    """What the devices have for the arrays that are counted, and for all else."""
    arrays = [x for x in jax.tree.leaves(counted) if isinstance(x, jax.Array)]
    placed = [x for x in arrays if is_concrete(x)]
    devices = {device for x in placed for device in x.sharding.addressable_devices}
    found = [x.memory_stats() for x in devices or jax.local_devices()[:1]]
    if not all(found):
        raise ValueError(
            "limit_bytes must be given: got None, and the device does not tell its "
            "memory, as a CPU never does."
        )
    return min(_free(stats, _bytes_of(placed)) for stats in found if stats)


def _free(stats: dict[str, int], own: int) -> int:
    others = max(stats["bytes_in_use"] - own, 0)
    return int((1 - MARGIN) * stats["bytes_limit"]) - others
