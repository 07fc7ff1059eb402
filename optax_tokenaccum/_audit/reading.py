"""Reads the gradient that a loop applies off the parameters that it moves."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from optax_tokenaccum._core import arrays, trees
from optax_tokenaccum._core.contribution import as_num_tokens
from optax_tokenaccum._core.loss import LossFn, unpack
from optax_tokenaccum._core.trees import Batch, Gradients, Params

Run = Callable[[optax.GradientTransformationExtraArgs, Any, Sequence[Any]], Any]
# (params, micro-batches) -> tokens [k], gradients of summed losses [k, parameters].
TokenSums = Callable[[Any, list[Any]], tuple[np.ndarray, np.ndarray]]

# The relative distance of nearby points: a few units of bfloat16, so that bfloat16
# rounding errors differ between the points.
NEARBY = 2.0**-6
NO_UPDATE = -1


class Reading(NamedTuple):
    """One way to read a loop's first update, with the gradients to compare it to."""

    gradients: np.ndarray  # of each micro-batch's summed loss, [k, parameters]
    first: np.ndarray  # what the first update applied, [parameters]


class Window:
    """A loop, and the window that it runs at some parameters."""

    def __init__(
        self, run: Run, token_sums: TokenSums, params: Params, micro_batches: list[Any]
    ):
        self.run, self.token_sums = run, token_sums
        self.params, self.micro_batches = params, micro_batches
        self.tokens, self.gradients = token_sums(params, micro_batches)
        self.exact = self.gradients.sum(0) / self.tokens.sum()

    def after(self, which: int, scale: float = 1.0) -> Params:
        """The parameters after the loop, if only update `which` moves them."""
        # The loop may change its micro-batches in place, or donate them.
        given = jax.tree.map(_copy, self.micro_batches)
        moved = self.run(_sgd_once(which, scale), arrays.owned(self.params), given)
        trees.check_same_tree(
            moved, self.params, "run must return the parameters it was given, moved"
        )
        return jax.tree.map(jnp.asarray, moved)

    @cached_property
    def still(self) -> Params:
        """The parameters after the loop without any update, which may drift."""
        return self.after(NO_UPDATE)

    @property
    def drifts(self) -> bool:
        return bool((flat(self.still) != flat(self.params)).any())

    @cached_property
    def scale(self) -> float:
        """A power of 2 that makes the update larger than the parameters.

        Rounding to the parameters' dtype then costs a unit of the gradient, not of the
        parameters. With a margin of 2**30, leaves and micro-batches with a billionth of
        the gradient can still be read. float16 would overflow, so its margin is 4.
        """
        dtypes = [x.dtype for x in jax.tree.leaves(self.params)]
        margin = 4.0 if jnp.float16 in dtypes else 2.0**30
        exact = np.linalg.norm(self.exact)
        size = np.linalg.norm(flat(self.params)) or exact
        return _power_of_2(margin * size / exact)

    def applied(self, which: int) -> np.ndarray:
        """What update `which` applied; zeros if the loop has no such update."""

        def read(scale: float) -> np.ndarray:
            return (flat(self.still) - flat(self.after(which, scale))) / scale

        found = read(self.scale)
        if not np.isfinite(found).all():
            # An undivided sum may have overflowed: read it at a smaller scale.
            found = read(self.scale / _power_of_2(self.tokens.sum()))
        return found

    def readings(self) -> list[Reading]:
        """Reads what the first update applied, in four ways.

        A loop may drift before or after it computes the gradient, and the drift may or
        may not scale the update. Without drift, the four readings are the same.
        """
        applied = self.applied(0)
        _, gradients_there = self.token_sums(self.still, self.micro_batches)
        start, end = flat(self.params), flat(self.still)
        scaled = np.divide(
            applied * start, end, out=applied.copy(), where=(start != 0) & (end != 0)
        )
        return [
            Reading(gradients, first)
            for gradients in (self.gradients, gradients_there)
            for first in (applied, scaled)
        ]

    def second(self) -> np.ndarray:
        """What the second update applied; zeros if there was none."""
        found = self.applied(1)
        if found.any():
            # The loop may drift at random, differently in each run.
            chance = flat(self.still) - flat(self.after(NO_UPDATE))
            if np.linalg.norm(found) * self.scale <= 4 * np.linalg.norm(chance):
                return np.zeros_like(found)
        return found  # NaN also counts as movement

    def noise(self, place: int, reading: Reading) -> float:
        """Estimates the relative rounding error of the reading at index `place`.

        The estimate is the second difference of the least-squares residuals at the
        parameters and at two nearby points. Errors of the loop change smoothly and
        cancel; rounding errors do not.
        """
        weights, *_ = np.linalg.lstsq(reading.gradients.T, reading.first, rcond=None)

        def rest(reading: Reading) -> np.ndarray:
            return reading.first - weights @ reading.gradients

        difference = -2 * rest(reading)
        for direction in (1, -1):
            there = (
                _nearby(self.params, direction),
                _nearby(self.micro_batches, direction, is_batch=True),
            )
            nearby = Window(self.run, self.token_sums, *there)
            difference += rest(nearby.readings()[place])
        size = np.linalg.norm(reading.first)
        return float(np.linalg.norm(difference) / 6**0.5 / size) if size else 0.0


def token_sums_of(loss_fn: LossFn) -> TokenSums:
    """The function that returns tokens and gradients, as float64 arrays."""

    def loss(params: Params, batch: Batch) -> Any:
        return unpack(loss_fn(params, batch), False)

    gradient = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))

    def token_sums(
        params: Params, micro_batches: list[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        found = [gradient(params, batch) for batch in micro_batches]
        tokens = np.array([as_num_tokens(n) for _, (n, _) in found], np.float64)
        if not (np.isfinite(tokens).all() and (tokens >= 0).all() and tokens.any()):
            raise ValueError(
                "Token counts must be finite, at least 0, and not all 0: got "
                f"{tokens.tolist()}."
            )
        gradients = np.stack([flat(gradient) for gradient, _ in found])
        return tokens, np.where(tokens[:, None] > 0, gradients, 0)

    return token_sums


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree that have a gradient, as float64 `[parameters]`."""
    return np.concatenate([np.zeros(0), *numbers(tree)])


def numbers(tree: Any) -> list[np.ndarray]:
    """The numbers of each leaf; none for leaves without a gradient."""

    def numbers_of(path: KeyPath, leaf: np.ndarray) -> np.ndarray:
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        if not is_float:
            return np.zeros(0)
        flat = np.ravel(leaf)
        return flat.view(flat.real.dtype).astype(np.float64)  # complex: two numbers

    return [numbers_of(*x) for x in jax.tree_util.tree_leaves_with_path(tree)]


def _power_of_2(x: Any) -> float:
    return float(2.0 ** np.round(np.log2(x)))


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray | jax.Array) else x


def _sgd_once(which: int, scale: float) -> optax.GradientTransformationExtraArgs:
    """SGD in which only update number `which`, counted from 0, moves parameters."""

    def init(params: Params) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def update(
        updates: Gradients, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Gradients, jax.Array]:
        def step(g: jax.Array) -> jax.Array:
            if g.dtype == jax.dtypes.float0:
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
