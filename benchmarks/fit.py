"""Whether `largest_micro_batch` finds the largest micro-batch, and its real memory."""

import ctypes
import gc
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.settings import Settings
from benchmarks.tpu import shapes_alone
from benchmarks.workloads import FIT_WORKLOADS, GIGABYTE_WORKLOADS, Workload
from optax_tokenaccum import (
    StepState,
    TrainStep,
    largest_micro_batch,
    make_train_step,
)
from optax_tokenaccum._steps.compile_ahead import Lowering, Programs, signature

K = 4


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every model: what was found under random limits of memory."""
    rows = []
    for name in settings.fit_workloads:
        settings.say(f"fit: {name}")
        rows.append({"model": name} | _found(settings, FIT_WORKLOADS[name]()))
    return rows


def run_real(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every large model: predicted and real memory of a process."""
    rows = []
    for name in settings.gigabyte_workloads:
        settings.say(f"real memory: {name}")
        command = [sys.executable, "-m", "benchmarks.fit", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append({"model": name} | json.loads(done.stdout.splitlines()[-1]))
    return rows


def _found(settings: Settings, workload: Workload) -> dict[str, Any]:
    step = make_train_step(workload.loss_fn, optax.adamw(1e-4), K)
    state = jax.eval_shape(step.init, workload.params)
    compiled = CompiledOnce(step, state, workload)
    sizes = range(1, settings.fit_sizes + 1)
    peaks = np.array([compiled.peak(shapes_of(workload, n)) for n in sizes])
    limits = np.random.default_rng(0).integers(peaks[0], peaks[-1], settings.fit_limits)
    right = over = most = 0
    for limit in limits:
        compiled.asked = 0
        fit = largest_micro_batch(
            compiled,
            state,
            lambda n: [shapes_of(workload, n)],
            limit_bytes=int(limit),
            frozen=workload.frozen,
        )
        true = int(np.argmax(peaks > limit))  # all smaller sizes fit
        right += fit.size == true
        over += fit.size > true
        most = max(most, compiled.asked)
    return {
        "limits": len(limits),
        "largest found": right,
        "too large": over,
        "compilations, at most": most,
    }


class CompiledOnce:
    """A train step that compiles a program once for all searches."""

    def __init__(self, step: TrainStep, state: StepState, workload: Workload):
        self.asked = 0
        programs = step._programs(state, frozen=workload.frozen)
        (close,) = (_compiled(lowering()) for lowering in programs.others)
        self._programs_of_run = programs._replace(
            for_batch=self._for_batch, others=(lambda: close,)
        )
        self._lowering = programs.for_batch
        self._known: dict[Any, Lowering] = {}
        self._moments = _bytes(state.opt_state.inner_opt_state)
        self._frozen = _bytes(workload.frozen)

    def _programs(self, *_: Any, **__: Any) -> Programs:
        return self._programs_of_run

    def peak(self, batch: Any) -> int:
        """The most that the device holds, by the definition."""
        first, close = self._at(batch), self._programs_of_run.others[0]()
        accumulate, update = (_peak(x.lowered.compile()) for x in (first, close))
        besides = _bytes(batch) + self._frozen
        metrics = max(_bytes(x.lowered.out_info[1:]) for x in (first, close))
        return metrics + max(accumulate + self._moments, update + besides)

    def _for_batch(self, batch: Any) -> Lowering:
        self.asked += 1
        return self._at(batch)

    def _at(self, batch: Any) -> Lowering:
        key = signature(batch)
        if key not in self._known:
            self._known[key] = _compiled(self._lowering(batch))
        return self._known[key]


class _Done(NamedTuple):
    program: jax.stages.Compiled
    out_info: Any

    def compile(self) -> jax.stages.Compiled:
        return self.program


def _compiled(lowering: Lowering) -> Any:
    """Without LLVM's optimizations, which change no buffer."""
    options = {"xla_backend_optimization_level": 0}
    done: Any = _Done(lowering.lowered.compile(options), lowering.lowered.out_info)
    return Lowering(done, lowering.arguments)


def _peak(program: Any) -> int:
    held = program.memory_analysis()
    without_aliases = held.output_size_in_bytes - held.alias_size_in_bytes
    return held.argument_size_in_bytes + without_aliases + held.temp_size_in_bytes


def _bytes(tree: Any) -> int:
    sizes = (math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return sum(sizes)


def shapes_of(workload: Workload, times: int) -> Any:
    """The shapes of a micro-batch with as many times the rows of the workload."""
    one = workload.micro_batch(np.random.default_rng(0))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * len(x), *x.shape[1:]), x.dtype), one
    )


def main() -> None:
    """Runs two windows of a large model in this process, and prints its memory."""
    make = GIGABYTE_WORKLOADS[sys.argv[1]]
    workload = shapes_alone(make)
    step = make_train_step(workload.loss_fn, optax.adamw(1e-4), K)
    state = jax.eval_shape(step.init, workload.params)
    resident = _bytes((state, workload.frozen))
    fit = largest_micro_batch(
        step,
        state,
        lambda rows: [shapes_of(workload, rows)],
        limit_bytes=int(1.3 * resident),
        frozen=workload.frozen,
    )
    batch = shapes_of(workload, fit.size)
    step.compile(state, [batch], frozen=workload.frozen)
    before = _memory_of_process("VmRSS")
    state = step.init(jax.tree.map(_numbers, workload.params))
    frozen = jax.tree.map(_numbers, workload.frozen)
    micro_batch = jax.tree.map(_numbers, batch)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    for _ in range(2 * K):
        state, _ = step(state, micro_batch, frozen=frozen)
    jax.block_until_ready(state)
    real = _memory_of_process("VmHWM") - before
    print(
        json.dumps(
            {
                "resident MB": round(resident / 1e6),
                "rows": fit.size,
                "predicted MB": round(fit.peak_bytes / 1e6),
                "real MB": round(real / 1e6),
                "predicted / real": fit.peak_bytes / real,
            }
        )
    )


def _numbers(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.full(x.shape, 0.01, x.dtype)
    return jnp.ones(x.shape, x.dtype)


def _memory_of_process(name: str) -> int:
    """Bytes, after freed memory was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = re.findall(rf"{name}:\s*(\d+)", status)
    return 1024 * int(kibibytes)


if __name__ == "__main__":
    main()
