"""Shared by tests: a ragged problem with a float64 reference, and its tolerances."""

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step
from optax_tokenaccum.losses import softmax_cross_entropy_sum

# Relative error of a gradient after one window, by the dtype of the computation.
RTOL = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 3e-2, "float16": 4e-3}

# Two parameters, for gradients that have one number in every entry.
PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0]), "b": jnp.asarray(0.5, jnp.float32)}

VOCABULARY, WIDTH, ROWS, MAX_LENGTH = 32, 16, 32, 64
SKIPS: dict[str, Any] = {"should_skip_update_fn": optax.skip_not_finite}


def slow(*values: Any, **options: Any) -> Any:
    """Values of a test's parameters, for the slow tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def grads(scale: Any) -> Any:
    """Return a gradient of `PARAMS`, with this number in every entry."""
    return jax.tree.map(lambda p: jnp.full_like(p, scale), PARAMS)


def ragged_batch(seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Return `rows` sequences of 2 to 64 loss tokens, padded to 64."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, MAX_LENGTH + 1, rows)
    # Short and long rows carry different text, as in real data. That makes a mean of
    # means differ from the mean.
    offset = np.where(lengths < MAX_LENGTH // 2, 0, VOCABULARY // 2)[:, None]
    ids = (rng.integers(0, VOCABULARY // 2, (rows, MAX_LENGTH + 1)) + offset).astype(
        np.int32
    )
    return {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "mask": np.arange(MAX_LENGTH) < lengths[:, None],
    }


def cut(batch: Any, k: int) -> list[Any]:
    """Split a batch into `k` micro-batches with equal numbers of rows."""
    rows = len(jax.tree.leaves(batch)[0]) // k
    slices = [slice(i * rows, (i + 1) * rows) for i in range(k)]
    return [jax.tree.map(operator.itemgetter(rows), batch) for rows in slices]


def stack(micro_batches: Any) -> Any:
    """Stack micro-batches in one tree, leaves `[k, micro, ...]`."""

    def stack_leaves(*xs: Any) -> Any:  # compiles nothing outside of a trace
        return (jnp if isinstance(xs[0], jax.core.Tracer) else np).stack(xs)

    return jax.tree.map(stack_leaves, *micro_batches)


def stacked(batch: Any, k: int) -> Any:
    return stack(cut(batch, k))


def init_params(seed: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "hidden": (WIDTH, WIDTH),
        "out": (WIDTH, VOCABULARY),
    }
    return {
        name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype)
        for name, shape in shapes.items()
    }


def logits_of(params: Any, tokens: Any) -> jax.Array:
    x = params["embed"][tokens]
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss_sum_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return softmax_cross_entropy_sum(
        logits_of(params, batch["tokens"]), batch["labels"], batch["mask"]
    )


def loss_mean_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    loss_sum, num_tokens = loss_sum_fn(params, batch)
    return loss_sum / num_tokens, num_tokens


def in_float64(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Compute `f(params, batch)` in float64, compiled once for each shape."""
    jitted = jax.jit(f)

    def wrapped(params: Any, batch: Any) -> Any:
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, jitted(wide, batch))

    return wrapped


@in_float64
@jax.grad
def float64_gradient(params: Any, batch: Any) -> Any:
    """The gradient of the token mean over the whole batch, computed in float64."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits_of(params, batch["tokens"]), batch["labels"]
    )
    return jnp.sum(jnp.where(batch["mask"], losses, 0)) / jnp.sum(batch["mask"])


def new_train_step(
    kind: str, loss_fn: Any, optimizer: Any, k: int, **options: Any
) -> Any:
    """Return a step of "two programs", or of "one program" for a schedule of `k`."""
    schedule = k if kind == "two programs" else lambda _: k
    return make_train_step(loss_fn, optimizer, schedule, **options)


def run_step(step: Any, state: Any, batches: Iterable[Any], **kwargs: Any) -> Any:
    """Call the step with each batch; return the last state and metrics."""
    for batch in batches:
        state, metrics = step(state, batch, **kwargs)
    return state, metrics


def micro_step(optimizer: Any, loss_fn: Any, counted: bool = True) -> Any:
    """Return a compiled `step(params, state, batch)` around an optimizer's update."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        grads, n = jax.grad(loss_fn, has_aux=True)(params, batch)
        count = {"num_tokens": n} if counted else {}
        updates, state = optimizer.update(grads, state, params, **count)
        return optax.apply_updates(params, updates), state

    return step


def relative_error(got: Any, expected: Any) -> float:
    """Return the L2 norm of the trees' difference over the norm of the second."""
    flat = [
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)])
        for t in (got, expected)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def difference(before: Any, after: Any) -> Any:
    """Return the gradient that `sgd(1.0)` applied between two trees of parameters."""
    return jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64),
        before,
        after,
    )


def signatures(tree: Any) -> list[Any]:
    """Return what decides on a retrace: shape, dtype and weak type of every leaf."""
    return [
        (x.shape, x.dtype, getattr(x, "weak_type", False))
        for x in jax.tree.leaves(tree)
    ]


def run_window(
    update: Callable[..., Any],
    state: Any,
    params: Any,
    micro_batches: list[tuple[Any, Any]],
    **extra_args: Any,
) -> tuple[Any, Any]:
    """Apply `update` to each `(gradients, num_tokens)` in turn."""
    for grads, num_tokens in micro_batches:
        updates, state = update(
            grads, state, params, num_tokens=num_tokens, **extra_args
        )
        params = optax.apply_updates(params, updates)
    return params, state


def net_bytes(lowered: Any) -> int:
    """Return the bytes of temporaries, and of results that are not in place."""
    memory = lowered.compile().memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + made


def bytes_sent(program: jax.stages.Compiled) -> int:
    """Return the bytes that collective operations make, with one run of every loop."""
    made = r" = (.*?) (?:all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("
    arrays = re.findall(
        r"\b[a-z]+(\d+)\[([\d,]*)\]", " ".join(re.findall(made, program.as_text()))
    )
    sizes = (
        math.prod(map(int, shape.split(","))) if shape else 1 for _, shape in arrays
    )
    return sum(n * int(bits) // 8 for n, (bits, _) in zip(sizes, arrays, strict=True))


def numbers_of(tree: Any) -> list[np.ndarray]:
    """Return copies of the leaves, with keys as numbers."""

    def read(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return [read(x) for x in jax.tree.leaves(tree)]


_compilations: list[str] = []


def _listen(event: str, duration: float, **metadata: Any) -> None:
    if "backend_compile" in event:
        _compilations.append(event)


# Registered permanently: the oldest supported jax has no public way to unregister.
jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collect one entry for every XLA compilation inside the block."""
    before, seen = len(_compilations), []
    yield seen
    seen.extend(_compilations[before:])
