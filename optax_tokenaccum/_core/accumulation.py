"""What every way into the library shares: add a micro-batch, close, divide once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core import backward, checks, donation, trees
from optax_tokenaccum._core.perturbations import PerturbedLoss, contribution
from optax_tokenaccum._core.schedule import CountSchedule, Schedule, make_schedule
from optax_tokenaccum._core.state import SkipState, TokenAccumulationState
from optax_tokenaccum._core.trees import T

# optax's protocol: (updates, gradient_step, params) -> (whether to skip, its state).
SkipFn = Callable[..., tuple[ArrayLike, trees.Tree]]


class Added(NamedTuple):
    """What a micro-batch or a window leaves behind, added or skipped."""

    opt_state: TokenAccumulationState
    skipped: jax.Array
    aux: trees.Aux = None
    model_state: trees.ModelState = None


@dataclass(frozen=True)
class Accumulation:
    """A window's arithmetic: `add` a micro-batch, `close` the window."""

    inner: optax.GradientTransformationExtraArgs
    schedule: Schedule
    gradients: Literal["sum", "mean"]  # of the loss over the tokens
    should_skip_update_fn: SkipFn | None
    accumulator_dtype: trees.DType | None  # `None`: float32 or wider
    token_mean: bool  # `False`: sums are handed over undivided

    def init(
        self, params: trees.Params, sums: trees.Gradients | None = None
    ) -> TokenAccumulationState:
        """The state of a run. `sums` are zeros like the parameters, unless given."""
        checks.check_params(params)
        return self.empty_window(params, sums, self.init_inner(params))

    def init_inner(self, params: trees.Params) -> trees.OptState:
        """The state of the inner optimizer, which must not accumulate too."""
        inner_opt_state = self.inner.init(params)
        accumulates = TokenAccumulationState, optax.MultiStepsState
        if trees.nodes_of(accumulates, inner_opt_state):
            raise ValueError(checks.ACCUMULATES)
        return inner_opt_state

    def empty_window(
        self,
        params: trees.Params,
        sums: trees.Gradients | None = None,
        inner_opt_state: trees.OptState = (),
    ) -> TokenAccumulationState:
        dtypes = self.dtypes(params)
        if sums is None:
            sums = jax.tree.map(jnp.zeros_like, params, dtypes)
        dtype = trees.common_dtype(jnp.float32, *jax.tree.leaves(dtypes))
        zero, gradient_step = jnp.zeros((), dtype).real, jnp.zeros((), jnp.int32)
        skip_state: SkipState | tuple[()] = ()
        if self.should_skip_update_fn is not None:
            zeros = jax.tree.map(jnp.zeros_like, params)
            _, of_function = self._asked(zeros, gradient_step, params)
            skip_state = SkipState(of_function, jnp.zeros((), jnp.int32))
        state = TokenAccumulationState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=gradient_step,
            inner_opt_state=inner_opt_state,
            grad_sums=sums,
            acc_tokens=zero,
            acc_value=zero,
            has_updated=jnp.zeros((), jnp.bool_),
            skip_state=skip_state,
        )
        return donation.canonicalize_state(params, state)

    def dtypes(self, params: trees.Params) -> trees.Tree:
        """The dtypes of the sums, by the tree of the parameters."""

        def dtype_of(param: jax.Array) -> trees.DType:
            given = jnp.result_type(param)
            if self.accumulator_dtype is None:
                return trees.at_least_float32(given)
            if jnp.issubdtype(given, jnp.complexfloating):
                return trees.common_dtype(self.accumulator_dtype, jnp.complex64)
            return self.accumulator_dtype

        return jax.tree.map(dtype_of, params)

    def add(
        self,
        gradients: trees.Gradients,
        state: TokenAccumulationState,
        params: trees.Params | None,
        num_tokens: ArrayLike | None,
        value: ArrayLike | None = None,
    ) -> Added:
        if not isinstance(state, TokenAccumulationState):
            raise TypeError(
                "The state must be the TokenAccumulationState that init or the last "
                f"call returned: got a {type(state).__name__}. Take one of "
                "optax.MultiSteps over with from_multi_steps_state."
            )
        trees.check_same_tree(
            gradients,
            state.grad_sums,
            "Gradients (of value_and_grad, the second result) must have the tree and "
            "shapes of the parameters given to init",
        )
        dtype = state.acc_tokens.dtype
        n = trees.as_num_tokens(num_tokens, dtype)
        value = trees.as_real_scalar(0.0 if value is None else value, "value", dtype)
        skipped, skip_state = self.should_skip(gradients, state, params, n)

        def add_leaf(so_far: jax.Array, x: trees.Leaf) -> jax.Array:
            if trees.is_float0(x):
                return so_far
            wide = jnp.asarray(x).astype(trees.at_least_float32(so_far.dtype))
            x = contribution(self._weighted(wide, n), n)
            return backward.add(so_far, trees.zero_unless(~skipped, x))

        sums = jax.tree.map(add_leaf, state.grad_sums, gradients)
        weighted = self._weighted(jnp.asarray(value), n)
        return self._added(state, sums, n, weighted, skipped, skip_state)

    def add_loss(
        self,
        loss: PerturbedLoss,
        state: TokenAccumulationState,
        params: trees.Params,
        is_spread: list[bool],
        reduce_over_devices: Callable[[trees.Gradients], trees.Gradients],
    ) -> Added:
        """Differentiates a perturbed loss, and adds the micro-batch.

        `reduce_over_devices` is for `should_skip_update_fn`, which is given the
        gradients over all devices. For `is_spread`, see `add_gradients`.
        """
        sums, structure = jax.tree.flatten(state.grad_sums)
        leaves = jax.tree.leaves(params)
        skipped, skip_state = jnp.zeros((), jnp.bool_), state.skip_state
        if self.should_skip_update_fn is None:
            added = backward.add_gradients(loss, sums, params, is_spread)
            sums, value, (n, aux) = added
        else:
            why = "should_skip_update_fn is given the whole gradient"
            backward.report(params, dict.fromkeys(range(len(leaves)), why))
            differentiate = jax.value_and_grad(loss, has_aux=True)
            perturbations = backward.zero_perturbations(sums, leaves)
            (value, (n, aux)), gradients = differentiate(perturbations)
            pairs = zip(gradients, sums, strict=True)
            whole = [jnp.zeros_like(x) if g is None else g for g, x in pairs]
            over_all = reduce_over_devices(structure.unflatten(whole))
            skipped, skip_state = self.should_skip(over_all, state, params, n)
            sums = [
                backward.add(x, trees.zero_unless(~skipped, g))
                for x, g in zip(sums, whole, strict=True)
            ]
        sums = structure.unflatten(sums)
        value = jnp.asarray(value, state.acc_value.dtype)
        added = self._added(state, sums, n, value, skipped, skip_state)
        return added._replace(aux=aux)

    def should_skip(
        self,
        gradients: trees.Gradients,
        state: TokenAccumulationState,
        params: trees.Params | None,
        num_tokens: jax.Array,
    ) -> tuple[jax.Array, SkipState | tuple[()]]:
        """Whether `should_skip_update_fn` rejects a micro-batch; its new state."""
        if self.should_skip_update_fn is None:
            return jnp.zeros((), jnp.bool_), state.skip_state
        n = jnp.where(num_tokens > 0, num_tokens, 1)
        like = gradients if params is None else params

        def per_token(g: jax.Array, p: jax.Array) -> jax.Array:
            if trees.is_float0(g):
                return jnp.zeros_like(p)
            mean = g if self.gradients == "mean" else trees.divide(g, n)
            return mean.astype(jnp.result_type(p))

        mean = jax.tree.map(per_token, gradients, like)
        skip, new = self._asked(mean, state.gradient_step, params)
        old: Any = state.skip_state
        trees.check_same_tree(
            old,
            SkipState(new, jnp.zeros((), jnp.int32)),
            "skip_state must come from this should_skip_update_fn (keep the function "
            "that the run began with, or take skip_state from a new init)",
        )
        is_usable = num_tokens > 0
        skipped = skip & is_usable
        of_function = jax.tree.map(
            lambda old, new: jnp.where(is_usable, new, old).astype(old.dtype),
            old.of_function,
            new,
        )
        return skipped, SkipState(of_function, old.rejected + skipped.astype(jnp.int32))

    def _asked(self, *given: trees.Tree) -> tuple[jax.Array, trees.Tree]:
        assert self.should_skip_update_fn is not None
        returned: Any = self.should_skip_update_fn(*given)
        if not isinstance(returned, tuple) or jnp.shape(returned[0]) != ():
            raise TypeError("should_skip_update_fn must return (a bool, a tree).")
        return jnp.asarray(returned[0], jnp.bool_), returned[1]

    def _weighted(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        # Without a token mean, the inner optimizer is given the sum of what was given.
        is_mean = self.token_mean and self.gradients == "mean"
        return x * num_tokens.astype(x.dtype) if is_mean else x

    def _added(
        self,
        state: TokenAccumulationState,
        sums: trees.Gradients,
        num_tokens: jax.Array,
        value: jax.Array,
        skipped: jax.Array,
        skip_state: SkipState | tuple[()],
    ) -> Added:
        """The state with new sums of gradients; adds the other numbers."""

        def add_number(so_far: jax.Array, x: jax.Array) -> jax.Array:
            return backward.add(so_far, jnp.where(skipped, jnp.zeros_like(x), x))

        new = state._replace(
            mini_step=state.mini_step + (1 - skipped.astype(jnp.int32)),
            grad_sums=sums,
            acc_tokens=add_number(state.acc_tokens, jnp.maximum(num_tokens, 0)),
            acc_value=add_number(state.acc_value, contribution(value, num_tokens)),
            has_updated=jnp.zeros_like(state.has_updated),
            skip_state=skip_state,
        )
        return Added(new, skipped)

    def close(
        self,
        state: TokenAccumulationState,
        closes: trees.TracedBool,
        run: Callable[
            [TokenAccumulationState, T],
            tuple[trees.Gradients, T, trees.OptState],
        ],
        carried: T,
        loop: Callable[..., Any] = backward.at_most_once,
    ) -> tuple[TokenAccumulationState, T]:
        """If `closes`, ends the window, with an update if it holds any token.

        `run(state, carried)` makes the update. It returns what takes the memory of the
        sums (zeros, or updates), new values of `carried`, and the inner optimizer's
        state. Without an update, sums and `carried` are returned as they are.
        """
        # A window without tokens may hold sums, of losses that are real.
        due = closes if closes is False else closes & (state.acc_tokens > 0)

        def run_on(
            carry: tuple[trees.Gradients, T, trees.OptState],
        ) -> tuple[Any, ...]:
            sums, carried, old = carry
            whole = state._replace(grad_sums=sums, inner_opt_state=old)
            kept, carried, new = run(whole, carried)
            return kept, carried, trees.cast_like(new, old)

        def zero_if_closed(x: jax.Array) -> jax.Array:
            return jnp.where(closes, jnp.zeros_like(x), x)

        run_if = loop if backward.can_overwrite(state.grad_sums) else in_conditional
        carry = state.grad_sums, carried, state.inner_opt_state
        kept, carried, inner_opt_state = run_if(due, run_on, carry)
        skip_state = state.skip_state
        if isinstance(skip_state, SkipState):
            rejected = zero_if_closed(skip_state.rejected)
            skip_state = SkipState(skip_state.of_function, rejected)
        closed = state._replace(
            mini_step=zero_if_closed(state.mini_step),
            gradient_step=state.gradient_step + jnp.asarray(due, jnp.int32),
            inner_opt_state=inner_opt_state,
            grad_sums=kept,
            acc_tokens=zero_if_closed(state.acc_tokens),
            acc_value=zero_if_closed(state.acc_value),
            has_updated=jnp.asarray(due),
            skip_state=skip_state,
        )
        return closed, carried

    def window_so_far(
        self, state: TokenAccumulationState
    ) -> tuple[jax.Array, jax.Array]:
        """Token-mean loss and tokens of the open window; both are 0 without tokens."""
        loss = self._mean(state.acc_value, state)
        return jnp.where(state.acc_tokens > 0, loss, 0), state.acc_tokens

    def window_gradient(
        self, state: TokenAccumulationState, like: trees.Gradients
    ) -> trees.Gradients:
        """`sum g / sum n` in the dtypes of `like`, divided before the one cast."""

        def of_leaf(acc: jax.Array, g: trees.Leaf) -> trees.Leaf:
            if trees.is_float0(g):
                return trees.zeros_of(g)
            # A divisor of its own for each leaf: of a shared one XLA makes a scalar
            # first, and then stores the divided gradient for its several readers.
            return self._mean(acc, state).astype(jnp.result_type(g))

        return jax.tree.map(of_leaf, state.grad_sums, like)

    def window_gradient_in_place(
        self, state: TokenAccumulationState, like: trees.Gradients
    ) -> trees.Gradients:
        """The same, in the memory of the sums."""
        # In sums that are narrower than float32 the quotient would be rounded twice.
        if backward.CAN_ADD_IN_PLACE and trees.are_wide(state.grad_sums):
            return trees.cast_like(self._quotients(state), like)
        return self.window_gradient(state, like)

    def gradient_and_norm(
        self, state: TokenAccumulationState, like: trees.Gradients
    ) -> tuple[trees.Gradients, jax.Array]:
        """The gradient of a window, and its global norm, for an update."""
        dtype = state.acc_value.dtype
        if backward.can_overwrite(state.grad_sums) and trees.are_wide(state.grad_sums):
            # A TPU would store gradients that are narrower than their sums, unless it
            # casts them where the update reads them.
            quotients = self._quotients(state)
            norm = norm_of(quotients, dtype)
            quotients, norm = jax.lax.optimization_barrier((quotients, norm))
            return trees.cast_like(quotients, like), norm
        # Divided after the norm: where the divided gradient has a second reader, XLA
        # stores all of it.
        norm = self._mean(norm_of(state.grad_sums, dtype), state)
        return self.window_gradient(state, like), norm

    def _quotients(self, state: TokenAccumulationState) -> trees.Gradients:
        """The gradient of a window in the dtypes and memory of the sums."""

        def divide(acc: trees.Gradients) -> trees.Gradients:
            return self.window_gradient(state._replace(grad_sums=acc), like=acc)

        # The loop is what makes XLA reuse the memory of the sums. An empty window has
        # nothing to divide.
        return backward.at_most_once(state.mini_step > 0, divide, state.grad_sums)

    def _mean(self, x: jax.Array, state: TokenAccumulationState) -> jax.Array:
        return trees.token_mean(x, state.acc_tokens) if self.token_mean else x


def make_accumulation(
    inner: optax.GradientTransformation,
    every_k_schedule: CountSchedule | None = None,
    every_n_tokens: CountSchedule | None = None,
    gradients: Literal["sum", "mean"] = "sum",
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: trees.DType | None = None,
    token_mean: bool = True,
) -> Accumulation:
    """Checks the arguments that every public constructor has in common."""
    schedule = make_schedule(every_k_schedule, every_n_tokens)
    if gradients not in ("sum", "mean"):
        raise ValueError(
            f"gradients must be 'sum' or 'mean', what they are of: got {gradients!r}."
        )
    if should_skip_update_fn is not None:
        checks.check_function(should_skip_update_fn, "should_skip_update_fn")
    if accumulator_dtype is not None:
        accumulator_dtype = dtype = jnp.dtype(accumulator_dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(f"accumulator_dtype must be floating: got {dtype}.")
    return Accumulation(
        checks.as_inner_optimizer(inner),
        schedule,
        gradients,
        should_skip_update_fn,
        accumulator_dtype,
        token_mean,
    )


def norm_of(gradients: trees.Gradients, dtype: trees.DType) -> jax.Array:
    def wide(x: jax.Array) -> jax.Array:
        return x.astype(trees.common_dtype(x.dtype, dtype))

    return optax.tree.norm(jax.tree.map(wide, gradients)).astype(dtype)


def in_conditional(runs: trees.TracedBool, body: Callable[[T], T], carry: T) -> T:
    """`body(carry)` if `runs`, else `carry`, in a `jax.lax.cond` or a plain `if`."""
    if trees.is_concrete(runs):  # an eager `cond` would compile in every call
        return body(carry) if runs else carry
    return jax.lax.cond(runs, body, lambda carry: carry, carry)
