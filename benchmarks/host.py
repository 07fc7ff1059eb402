"""The host time of a call, more than that of `jit` itself, or of flax's `nnx.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_tokenaccum.nnx
from benchmarks.measure import interleaved, spread
from benchmarks.nnx_loop import Holder
from benchmarks.settings import Settings
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation

CALLS = 20
BATCH = np.arange(1.0, 5.0, dtype=np.float32)
SGD = optax.sgd(0.1)
NEVER = 1_000_000  # micro-batches of one window that stays open


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every number of leaves and every step."""
    rows = []
    for leaves in settings.host_leaves:
        settings.say(f"host time of {leaves} leaves")
        step = make_train_step(_loss_fn, SGD, NEVER)
        pair = _ours_and_plain(step, step.accumulate, leaves, BATCH)
        rows.append(_measure(settings, leaves, "train step", pair))
        if leaves <= 1000:  # XLA compiles a longer loop for many minutes
            step = make_window_step(_loss_fn, SGD)
            pair = _ours_and_plain(step, step, leaves, np.stack([BATCH] * 8))
            rows.append(_measure(settings, leaves, "window step", pair))
    for variables in settings.host_variables:
        settings.say(f"host time of {variables} variables")
        pair = _nnx_steps(variables)
        rows.append(_measure(settings, variables, "nnx train step", pair))
    return rows


def _measure(
    settings: Settings, leaves: int, name: str, pair: dict[str, Any]
) -> dict[str, Any]:
    times = interleaved(pair, rounds=20 * settings.rounds, seconds=20)
    plain = spread([1e6 * t / CALLS for t in times["plain"]])
    pairs = zip(times["ours"], times["plain"], strict=True)
    more = spread([1e6 * (a - b) / CALLS for a, b in pairs])
    return {
        "leaves": leaves,
        "step": name,
        "us of a plain call": round(plain.median, 1),
        "us more": more,
    }


def _loss_fn(params: list[jax.Array], batch: jax.Array) -> Any:
    """A loss of one parameter per leaf, and almost no computation."""
    total = jnp.sum(jnp.stack([jnp.sum(p) for p in params]))
    return total * jnp.sum(batch), jnp.sum(batch)


def _nnx_steps(variables: int) -> dict[str, Any]:
    """Our step, and flax's loop: an update in `nnx.jit`, by the same optimizer."""

    def loss_fn(model: Holder, batch: Any) -> Any:
        return _loss_fn(model.params(), batch)

    @nnx.jit
    def flax_step(model: Holder, optimizer: nnx.Optimizer, batch: Any) -> Any:
        gradient, n = nnx.grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, gradient, num_tokens=n)
        return n

    def calls(step: Any) -> _Calls:
        model = Holder([jnp.ones(1) for _ in range(variables)])
        tx = token_accumulation(SGD, NEVER)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def run(state: Any, data: Any) -> Any:
            return state, step(*state, data)

        return _Calls(run, (model, optimizer), BATCH)

    step = optax_tokenaccum.nnx.make_train_step(loss_fn)
    return {"ours": calls(step), "plain": calls(flax_step)}


def _ours_and_plain(ours: Any, traced: Any, leaves: int, data: Any) -> dict[str, Any]:
    """Calls of a step, and of `jit` of the same program with the same arguments."""
    params = [jnp.ones(1) for _ in range(leaves)]
    plain = jax.jit(lambda state, data: traced(state, data), donate_argnums=0)
    return {
        "ours": _Calls(ours, ours.init(params), data),
        "plain": _Calls(plain, ours.init(params), data),
    }


class _Calls:
    """Makes `CALLS` calls in a row and does not wait for their results."""

    def __init__(self, step: Any, state: Any, data: Any):
        self._step, self._state, self._data = step, state, jax.device_put(data)

    def __call__(self) -> Any:
        metrics = None
        for _ in range(CALLS):
            self._state, metrics = self._step(self._state, self._data)
        return self._state, metrics
