"""The time of a window, divided by the time of its gradients and one optimizer step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.limits import LIMITS, bytes_of_a_window
from benchmarks.loops import Contender, Loop
from benchmarks.measure import interleaved, ratios, spread
from benchmarks.ours import OURS
from benchmarks.peers import PEERS
from benchmarks.settings import Case, Settings
from benchmarks.workloads import Window, Workload, window_of

CONTENDERS: dict[str, Contender] = LIMITS | PEERS | OURS
BASE = "gradients + one step"
PAIRS = (
    ("optax.MultiSteps", "train step"),
    ("optax.MultiSteps", "window step"),
    ("optax.MultiSteps", "token_accumulation"),
    ("pair by hand", "train step"),
    ("scan by hand", "window step"),
    ("train step", BASE),
)
OPTIMIZERS = {"AdamW": optax.adamw(1e-4), "SGD": optax.sgd(1e-4)}
# Above the rounding of each dtype, far below the error of a mean of means.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every case and contender, and for every pair in `PAIRS`."""
    rows = []
    for case in settings.cases:
        settings.say(f"speed: {', '.join(map(str, case))}")
        rows += measure(case, settings)
    return rows


def measure(case: Case, settings: Settings) -> list[dict[str, Any]]:
    """Measures all contenders of one case in interleaved rounds."""
    workload = settings.workloads[case.workload]()
    inner, k = OPTIMIZERS[case.optimizer], case.k
    errors = check(workload, k)
    window = window_of(workload, k)
    running = {
        name: Running(contender.build(workload, inner, k), window)
        for name, contender in CONTENDERS.items()
    }
    times = interleaved(running, rounds=settings.rounds, seconds=settings.seconds)
    over_base = ratios(times, BASE)
    pairs = {
        f"{a} / {b}": spread([x / y for x, y in zip(times[a], times[b], strict=True)])
        for a, b in PAIRS
    }
    rows = [
        case._asdict()
        | {
            "contender": name,
            "kind": contender.kind,
            "gradient error": errors.get(name),
            "time": over_base[name],
        }
        for name, contender in CONTENDERS.items()
    ]
    if jax.default_backend() != "cpu":
        needed = bytes_of_a_window(workload, inner, k)
        for row in rows:
            seconds = spread(times[row["contender"]])
            row["milliseconds"] = spread([1e3 * x for x in seconds])
            row["GB/s of the bytes that must move"] = needed / seconds.median / 1e9
    return rows + [
        case._asdict() | {"pair": name, "ratio": ratio} for name, ratio in pairs.items()
    ]


def check(workload: Workload, k: int) -> dict[str, float]:
    """The relative error of every contender's gradient of a window.

    Raises:
      AssertionError: an exact contender is wrong, or an inexact one is right.
    """
    window = window_of(workload, k)
    exact = _gradient_in_float64(workload, window)
    # The update is far larger than the parameters, so none of it is rounded away.
    rate = 2.0**30
    errors = {}
    for name, contender in (PEERS | OURS).items():
        loop = contender.build(workload, optax.sgd(rate), k)
        after = loop.params(loop.run(loop.state, window))
        moved = jax.tree.map(
            lambda a, b: (_wide(a) - _wide(b)) / rate, workload.params, after
        )
        errors[name] = error = _relative_error(moved, exact)
        right = error < TOLERANCE[jnp.dtype(workload.dtype).name]
        assert right == (contender.exact or k == 1), (name, k, error)
    return errors


class Running:
    """A loop that continues from its last state."""

    def __init__(self, loop: Loop, window: Window):
        self._loop, self._state, self._window = loop, loop.state, window

    def __call__(self) -> Any:
        self._state = self._loop.run(self._state, self._window)
        return self._state


def _gradient_in_float64(workload: Workload, window: Window) -> Any:
    """Gradients of the summed losses, added up in float64 and divided by the tokens."""
    gradient = jax.jit(jax.grad(workload.loss_fn, has_aux=True))
    total, tokens = None, 0.0
    for batch in window.micro_batches:
        terms, n = gradient(workload.params, batch, workload.frozen)
        terms = jax.tree.map(_wide, terms)
        total = terms if total is None else jax.tree.map(np.add, total, terms)
        tokens += float(n)
    return jax.tree.map(lambda x: x / tokens, total)


def _relative_error(got: Any, expected: Any) -> float:
    difference = jax.tree.map(np.subtract, got, expected)
    return float(_norm(difference) / _norm(expected))


def _norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
