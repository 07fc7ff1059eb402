"""Reads the gradient that a loop applies off the parameters that it moves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum._core import arrays, trees
from optax_tokenaccum._core.contribution import as_num_tokens
from optax_tokenaccum._core.loss import LossFn, unpack
from optax_tokenaccum._core.overwritten import is_overwritten
from optax_tokenaccum._core.sums import is_float0
from optax_tokenaccum._core.trees import Batch, Gradients, Params

Run = Callable[[optax.GradientTransformationExtraArgs, Any, Sequence[Any]], Any]
# (params, micro-batches) -> tokens [k], gradients of summed losses [k, parameters].
TokenSums = Callable[[Any, list[Any]], tuple[np.ndarray, np.ndarray]]

# The relative distance of nearby points: a few units of bfloat16, so that bfloat16
# rounding errors differ between the points.
NEARBY = 2.0**-6


class Reading(NamedTuple):
    """One way to read a loop's first update, with the gradients to compare it to."""

    gradients: np.ndarray  # of each micro-batch's summed loss, [k, parameters]
    first: np.ndarray  # what the first update applied, [parameters]


class Loop(NamedTuple):
    """The loop under audit."""

    run: Run
    token_sums: TokenSums
    scale: float  # of the first update

    def moved(
        self, params: Params, micro_batches: list[Any], which: int, scale: float = 1.0
    ) -> Any:
        """Runs the loop; only update `which` (none if -1) moves the parameters."""
        optimizer = _reading_optimizer(which, scale)
        # The loop may change its micro-batches in place, or donate them.
        given = jax.tree.map(_copy, micro_batches)
        moved = self.run(optimizer, arrays.owned(params), given)
        trees.check_same_tree(
            moved, params, "run must return the parameters it was given, moved"
        )
        return jax.tree.map(jnp.asarray, moved)

    def readings(
        self, params: Params, micro_batches: list[Any], still: Any = None
    ) -> list[Reading]:
        """Reads what the first update applied, in four ways if the loop drifts.

        The drift is the movement from `params` to `still` without any update. It may
        come before or after the gradient is computed, and may or may not scale the
        update.
        """
        _, gradients = self.token_sums(params, micro_batches)
        if still is None:
            still = self.moved(params, micro_batches, -1)
        start, end = flat(params), flat(still)

        def first(scale: float) -> np.ndarray:
            return (end - flat(self.moved(params, micro_batches, 0, scale))) / scale

        applied = first(self.scale)
        if not np.isfinite(applied).all():
            # An undivided sum may have overflowed: read it at a smaller scale.
            tokens, _ = self.token_sums(params, micro_batches)
            applied = first(self.scale / power_of_2(tokens.sum()))
        if (start == end).all():
            return [Reading(gradients, applied)] * 4
        _, gradients_there = self.token_sums(still, micro_batches)
        scaled = np.divide(
            applied * start, end, out=applied.copy(), where=(start != 0) & (end != 0)
        )
        both = gradients, gradients_there
        return [Reading(g, x) for g in both for x in (applied, scaled)]

    def second(
        self, params: Params, micro_batches: list[Any], still: Any, scale: float
    ) -> np.ndarray:
        """The gradient of the second update; zeros if there is none."""

        found = flat(still) - flat(self.moved(params, micro_batches, 1, scale))
        if found.any() and (flat(still) != flat(params)).any():
            # The loop may drift at random, differently in each run.
            chance = flat(still) - flat(self.moved(params, micro_batches, -1))
            if np.linalg.norm(found) <= 4 * np.linalg.norm(chance):
                return np.zeros_like(found)
        return found / scale  # NaN also counts as movement

    def noise(
        self, params: Params, micro_batches: list[Any], place: int, reading: Reading
    ) -> float:
        """Estimates the relative rounding error of the reading at index `place`.

        The estimate is the second difference of the least-squares residuals at the
        parameters and at two nearby points. Errors of the loop change smoothly and
        cancel; rounding errors do not.
        """
        gradients, first = reading
        weights, *_ = np.linalg.lstsq(gradients.T, first, rcond=None)

        def rest(direction: int) -> np.ndarray:
            there = _nearby(params, direction), _nearby(micro_batches, direction, True)
            gradients, first = self.readings(*there)[place]
            return first - weights @ gradients

        difference = rest(1) + rest(-1) - 2 * (first - weights @ gradients)
        size = np.linalg.norm(first)
        return float(np.linalg.norm(difference) / 6**0.5 / size) if size else 0.0


def token_sums_of(loss_fn: LossFn) -> TokenSums:
    """The function that returns tokens and gradients, as float64 arrays."""

    @jax.jit
    def sums(params: Params, batch: Batch) -> tuple[jax.Array, Any]:
        def loss(params: Params) -> Any:
            return unpack(loss_fn(params, batch), False)

        gradient = jax.value_and_grad(loss, has_aux=True, allow_int=True)
        (_, (n, _)), g = gradient(params)
        return as_num_tokens(n), g

    def token_sums(
        params: Params, micro_batches: list[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        found = [sums(params, batch) for batch in micro_batches]
        tokens = np.array([n for n, _ in found], np.float64)
        if not (np.isfinite(tokens).all() and (tokens >= 0).all() and tokens.any()):
            raise ValueError(
                "Token counts must be finite, at least 0, and not all 0: got "
                f"{tokens.tolist()}."
            )
        gradients = np.stack([flat(gradient) for _, gradient in found])
        return tokens, np.where(tokens[:, None] > 0, gradients, 0)

    return token_sums


def readable_scale(params: Params, gradient: np.ndarray) -> float:
    """A power of 2 that makes the update larger than the parameters.

    Rounding to the parameters' dtype then costs a unit of the gradient, not of the
    parameters. With a margin of 2**10, leaves with a thousandth of the gradient can
    still be read. float16 would overflow with this margin, so its margin is 4.
    """
    is_float16 = any(x.dtype == jnp.float16 for x in jax.tree.leaves(params))
    margin = 4.0 if is_float16 else 2.0**10
    size = np.linalg.norm(flat(params)) or np.linalg.norm(gradient)
    return power_of_2(margin * size / np.linalg.norm(gradient))


def power_of_2(x: Any) -> float:
    return float(2.0 ** np.round(np.log2(x)))


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree that have a gradient, as float64 `[parameters]`."""
    parts = numbers(tree)
    return np.concatenate(parts) if parts else np.zeros(0)


def numbers(tree: Any) -> list[np.ndarray]:
    """The numbers of each leaf; none for integer and overwritten leaves."""
    return [
        np.zeros(0) if is_overwritten(path, leaf) else _numbers_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _numbers_of(leaf: Any) -> np.ndarray:
    if is_float0(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(0)
    flat = np.asarray(leaf).ravel()
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return np.concatenate([flat.real, flat.imag]).astype(np.float64)
    return flat.astype(np.float64)


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray | jax.Array) else x


def _reading_optimizer(
    which: int, scale: float
) -> optax.GradientTransformationExtraArgs:
    """SGD in which only update number `which`, counted from 0, moves parameters."""

    def init(params: Params) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def update(
        updates: Gradients, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, jax.Array]:
        def step(g: Any) -> Any:
            if is_float0(g):
                return g
            return jnp.where(state == which, -scale * g, 0).astype(g.dtype)

        return jax.tree.map(step, updates), state + 1

    return optax.GradientTransformationExtraArgs(init, update)


def _nearby(tree: Any, direction: int, is_batch: bool = False) -> Any:
    """Makes every number of a tree a little larger or smaller.

    In a batch, only leaves with fractional values move: a mask, a label or an id would
    mean something else.
    """
    random = np.random.default_rng(0)

    def move(x: Any) -> Any:
        if not jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact):
            return x
        if is_batch and (x == np.round(np.asarray(x))).all():
            return x
        factor = 1 + direction * NEARBY * random.uniform(-1, 1, np.shape(x))
        return x * factor.astype(x.dtype)

    return jax.tree.map(move, tree)
