"""What every way into the library shares: add a micro-batch, close, divide once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from optax import Params

from optax_tokenaccum._core import (
    arrays,
    checks,
    platforms,
    sums,
    trees,
)
from optax_tokenaccum._core.backward import (
    BackwardPass,
    CannotAdd,
    Returned,
)
from optax_tokenaccum._core.contribution import (
    Contribution,
    SkipFn,
    as_real_scalar,
    decision,
    per_token,
    usable_tokens,
)
from optax_tokenaccum._core.layout import ALONE, Layout, Peers, Reduced
from optax_tokenaccum._core.once import (
    AtMostOnce,
    OnlyIf,
    at_most_once,
    at_most_once_on_a_tpu,
    in_conditional,
)
from optax_tokenaccum._core.reports import report_loss
from optax_tokenaccum._core.schedule import Schedule
from optax_tokenaccum._core.state import TokenAccumulationState, nodes_of
from optax_tokenaccum._core.trees import DType, Gradients, OptState, T, TracedBool

A = TypeVar("A")

Norm = Callable[[], jax.Array]
# What is computed before an update.
First = Literal["norm", "norm on a TPU", "quotients on a TPU"]


class Added(NamedTuple, Generic[A]):
    """A micro-batch that was added to a window, or skipped."""

    state: TokenAccumulationState
    skipped: jax.Array
    aux: A


@dataclass(frozen=True)
class Accumulation:
    """A window's arithmetic: `add` a micro-batch, `close` the window."""

    inner: optax.GradientTransformationExtraArgs
    schedule: Schedule
    gradients: Literal["sum", "mean"]  # of the loss over the tokens
    should_skip_update_fn: SkipFn | None
    accumulator_dtype: DType | None  # `None`: float32 or wider
    token_mean: bool  # `False`: sums are handed over undivided
    layout: Layout
    peers: Peers
    begins_empty: bool = False  # whether every window begins with sums of zero

    def on(self, layout: Layout, peers: Peers = ALONE) -> "Accumulation":
        return replace(self, layout=layout, peers=peers)

    def init(self, params: Any, *, with_sums: bool = True) -> TokenAccumulationState:
        """The state of a run; `ValueError` if the inner optimizer accumulates already.

        Without sums, it is that of a step that closes a window in every call.
        """
        checks.check_are_numbers(params)
        inner_opt_state = self.inner.init(params)
        if nodes_of((TokenAccumulationState, optax.MultiStepsState), inner_opt_state):
            raise ValueError(
                "The inner optimizer already accumulates: a micro-batch would be "
                "counted by two windows. Pass the plain optimizer."
            )
        return self.empty_window(params, inner_opt_state, with_sums=with_sums)

    def empty_window(
        self, params: Params, inner_opt_state: OptState = (), *, with_sums: bool = True
    ) -> TokenAccumulationState:
        dtypes = self._dtypes(params)
        value_dtype = sums.common_dtype(jnp.float32, *jax.tree.leaves(dtypes))
        zero, gradient_step = jnp.zeros((), value_dtype).real, jnp.zeros((), jnp.int32)
        skip_state = ()
        if with_sums and self.should_skip_update_fn is not None:
            zeros = jax.tree.map(jnp.zeros_like, params)
            _, skip_state = self.should_skip_update_fn(zeros, gradient_step, params)
        state = TokenAccumulationState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=gradient_step,
            inner_opt_state=inner_opt_state,
            acc_grads=self.layout.zeros(params, dtypes) if with_sums else (),
            acc_tokens=zero,
            acc_value=zero,
            has_updated=jnp.zeros((), jnp.bool_),
            skip_state=skip_state,
        )
        return arrays.stable(params, state)

    def _dtypes(self, params: Params) -> Params:
        """The dtypes of the sums, and of what is stored like them."""

        checks.check_no_scales(params)
        return jax.tree.map(
            lambda p: sums.accumulator_dtype_of(p, self.accumulator_dtype), params
        )

    def add(
        self,
        updates: Gradients,
        state: TokenAccumulationState,
        params: Params | None,
        num_tokens: ArrayLike | None,
        value: ArrayLike | None = None,
    ) -> Added[None]:
        """Adds a micro-batch to the window.

        The first micro-batch of a window overwrites the sums here, outside of any
        conditional, because XLA copies gradient-sized sums that a conditional carries.

        Over several devices the counters, tokens and losses are those of all devices,
        and a micro-batch that one device rejects is added on none.
        """
        so_far = self._read(state, updates)
        gradients = jax.tree.map(
            lambda x, total: jnp.zeros_like(total) if sums.is_float0(x) else x,
            updates,
            so_far,
        )
        new = self._contribution(gradients, state, params, num_tokens, value)
        is_first, adds = self._is_first(state, new), self._adds(new)

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            x = new.weighted(x, total.dtype)
            total = sums.emptied(total, is_first)
            return sums.add_if(adds(self.peers.reduced(x)), total, x)

        return self._added(state, new, jax.tree.map(add, so_far, gradients))

    def add_loss(
        self,
        loss: Callable[[Params], Returned[A]],
        state: TokenAccumulationState,
        params: Params,
    ) -> Added[A]:
        """Differentiates a summed loss, and adds the micro-batch.

        The backward pass itself adds to the sums where it can, so that no gradient is
        held next to them.

        Args:
          loss: `loss(params) -> (loss_sum, (num_tokens, aux))`.
          state: the open window.
          params: the parameters.
        """
        report_loss()
        try:
            return self._add_within(loss, state, params)
        except CannotAdd as error:
            error.report(params)
        (loss_sum, (num_tokens, aux)), gradients = jax.value_and_grad(
            loss, has_aux=True, allow_int=True
        )(params)
        added = self.add(gradients, state, params, num_tokens, loss_sum)
        return Added(added.state, added.skipped, aux)

    def _add_within(
        self,
        loss: Callable[[Params], Returned[A]],
        state: TokenAccumulationState,
        params: Params,
    ) -> Added[A]:
        """Raises `CannotAdd` if gradients are added only after they are computed."""
        if self.should_skip_update_fn is not None:
            raise CannotAdd("should_skip_update_fn is given every gradient first")
        so_far, structure = jax.tree.flatten(self._read(state, params))
        backward_pass = BackwardPass(
            loss,
            params,
            so_far,
            self.layout.has_whole_axes(so_far, [0] * len(so_far)),
            self.layout.axes_of_layers(so_far),
            self.layout.scatters(),
            state.acc_tokens.dtype,
            self.peers,
        )
        is_first = None if self.begins_empty else state.mini_step == 0
        passed = backward_pass.add(so_far, is_first)
        new = self._contribution((), state, params, passed.num_tokens, passed.loss_sum)
        added = self._added(state, new, structure.unflatten(passed.sums))
        return Added(added.state, added.skipped, passed.aux)

    def _contribution(
        self,
        gradients: Gradients,
        state: TokenAccumulationState,
        params: Params | None,
        num_tokens: ArrayLike | None,
        value: ArrayLike | None,
    ) -> Contribution:
        """Checks a micro-batch, and asks `should_skip_update_fn` about it."""
        dtype, is_mean = state.acc_tokens.dtype, self.gradients == "mean"
        is_weighted = self.token_mean and is_mean
        tokens = usable_tokens(num_tokens, dtype)
        if not trees.is_zero(num_tokens):
            self.peers.check_tokens(gradients, tokens, is_mean=is_weighted)
        value = as_real_scalar(0.0 if value is None else value, "value", dtype)
        skipped, skip_state = jnp.zeros((), jnp.bool_), state.skip_state
        if self.should_skip_update_fn is not None:
            mean = gradients if is_mean else per_token(gradients, tokens, self.peers)
            asked = self.should_skip_update_fn(mean, state.gradient_step, params)
            skipped, skip_state = decision(*asked, state.skip_state, tokens > 0)
            skipped, skip_state = self.peers.agree(skipped, skip_state)
        return Contribution(tokens, value, is_weighted, skipped, skip_state)

    def _read(self, state: TokenAccumulationState, like: Gradients) -> Gradients:
        """The sums, whose tree and shapes `like` must have."""
        trees.check_state(state, TokenAccumulationState)
        so_far = self.layout.read(state.acc_grads)
        trees.check_same_tree(
            like,
            so_far,
            "Gradients must have the tree and shapes of the parameters given to init",
        )
        return so_far

    def _is_first(self, state: TokenAccumulationState, new: Contribution) -> TracedBool:
        """Whether the sums are emptied before this micro-batch is added."""
        return not self.begins_empty and (state.mini_step == 0) & ~new.skipped

    def _adds(self, new: Contribution) -> Callable[[Reduced], jax.Array]:
        """Whether this device adds a value that is reduced over some axes."""

        @functools.cache
        def adds(reduced: Reduced) -> jax.Array:
            return self.peers.contributes(reduced, new.num_tokens) & ~new.skipped

        return adds

    def _added(
        self, state: TokenAccumulationState, new: Contribution, so_far: Gradients
    ) -> Added[None]:
        """The state with new sums of gradients; adds the other numbers."""
        is_first, adds = self._is_first(state, new), self._adds(new)

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            is_own = adds(self.peers.reduced(x))
            own = jax.lax.select(is_own, x, jnp.zeros_like(x))
            return sums.add(sums.emptied(total, is_first), self.peers.sum(own))

        value = new.weighted(new.value, state.acc_value.dtype)
        added = state._replace(
            mini_step=state.mini_step + (1 - new.skipped.astype(jnp.int32)),
            acc_grads=self.layout.write(so_far),
            acc_tokens=add(state.acc_tokens, new.num_tokens),
            acc_value=add(state.acc_value, value),
            has_updated=jnp.zeros_like(state.has_updated),
            skip_state=new.skip_state,
        )
        return Added(added, new.skipped, None)

    def close(
        self,
        state: TokenAccumulationState,
        closes: TracedBool,
        like: Gradients,
        update: Callable[[Gradients, Norm, T, OptState], tuple[T, OptState]],
        otherwise: T,
        only_if: OnlyIf = in_conditional,
        first: First | None = None,
    ) -> tuple[T, TokenAccumulationState]:
        """If `closes`, ends the window, with an update if it holds any token.

        Args:
          state: as `add` left it.
          closes: whether the window ends now.
          like: the window's gradient has the dtypes of this tree.
          update: `update(gradient, norm, otherwise, inner_opt_state)` runs the inner
            optimizer on the window's gradient; it returns a result and the optimizer's
            state. `norm()` is the gradient's global norm.
          otherwise: the result if there is no update.
          only_if: how to run the update, which is given the sums.
          first: what comes before the update: the norm, so that no sum is kept for it,
            or the quotients too, in the sums' memory.

        Returns:
          The result and the new state.
        """
        due = closes if closes is False else closes & (state.acc_tokens > 0)

        def run(acc: Gradients, held: tuple[T, OptState]) -> tuple[T, OptState]:
            total = state._replace(acc_grads=self.layout.total(acc))
            norm = functools.partial(self.gradient_norm, total)
            if first == "quotients on a TPU" and _are_wide(total.acc_grads):
                quotients, known = self._quotients_and_norm(total)
                gradient = _as_like(quotients, like)
                norm = functools.partial(jnp.asarray, known)
            else:
                if first:
                    everywhere = first == "norm"
                    known, total = self._norm_first(total, everywhere)
                    norm = functools.partial(jnp.asarray, known)
                gradient = self.window_gradient(total, like)
            result, inner_opt_state = update(gradient, norm, *held)
            return result, arrays.cast_like(inner_opt_state, state.inner_opt_state)

        held, acc = only_if(
            due, run, state.acc_grads, (otherwise, state.inner_opt_state)
        )
        result, inner_opt_state = held
        return result, state._replace(
            mini_step=jnp.where(closes, 0, state.mini_step),
            gradient_step=state.gradient_step + jnp.asarray(due, jnp.int32),
            inner_opt_state=inner_opt_state,
            acc_grads=acc,
            has_updated=jnp.asarray(due),
        )

    def window_so_far(
        self, state: TokenAccumulationState
    ) -> tuple[jax.Array, jax.Array]:
        """Token-mean loss and tokens of the open window; both are 0 without tokens."""
        tokens = jnp.where(state.mini_step > 0, state.acc_tokens, 0)
        loss = sums.divide(state.acc_value, self._divisor(state))
        return jnp.where(tokens > 0, loss, 0), tokens

    def window_gradient(
        self, state: TokenAccumulationState, like: Gradients
    ) -> Gradients:
        """`sum g / sum n` in the dtypes of `like`, divided before the one cast.

        A float0 leaf of `like` stays float0.
        """

        divisor_of_leaf = self._divisors(state)

        def of_leaf(acc: jax.Array, g: jax.Array) -> jax.Array | np.ndarray:
            if sums.is_float0(g):
                return sums.zeros_of(g)
            # A divisor of its own for each leaf: of a shared one XLA makes a scalar
            # first, and then stores the divided gradient for its several readers.
            return sums.divide(acc, divisor_of_leaf()).astype(jnp.result_type(g))

        return jax.tree.map(of_leaf, state.acc_grads, like)

    def window_gradient_in_place(
        self, state: TokenAccumulationState, like: Gradients, *, may_loop: bool
    ) -> Gradients:
        """The same, zeros without tokens, in the memory of the sums.

        A plain division makes a second buffer of the gradient's size. A conditional
        divides in place, except on a GPU; a loop of zero or one trips does there too.
        But JAX cannot differentiate such a loop in reverse, and in sums that are
        narrower than float32 the quotient would be rounded twice.
        """
        has_tokens = state.acc_tokens > 0
        if not may_loop or not _are_wide(state.acc_grads):
            return jax.lax.cond(
                has_tokens,
                lambda: self.window_gradient(state, like),
                lambda: _as_like(state.acc_grads, like),
            )
        return _as_like(self._quotients(state), like)

    def _quotients(
        self, state: TokenAccumulationState, once: AtMostOnce = at_most_once
    ) -> Gradients:
        """The gradient of a window with tokens in the dtypes and memory of the sums."""

        def divide(acc: Gradients) -> Gradients:
            return self.window_gradient(state._replace(acc_grads=acc), like=acc)

        return once(state.acc_tokens > 0, divide, state.acc_grads)

    def _quotients_and_norm(
        self, state: TokenAccumulationState
    ) -> tuple[Gradients, jax.Array]:
        """The gradient in the dtypes of the sums, and its norm.

        A TPU stores gradients that are narrower than their sums, unless it casts them
        where the update reads them, from quotients in the memory of the sums.
        """

        def in_place(state: TokenAccumulationState) -> tuple[Gradients, jax.Array]:
            quotients = self._quotients(state, at_most_once_on_a_tpu)
            norm = sums.norm(quotients, state.acc_value.dtype)
            return jax.lax.optimization_barrier((quotients, norm))

        def plain(state: TokenAccumulationState) -> tuple[Gradients, jax.Array]:
            quotients = self.window_gradient(state, like=state.acc_grads)
            return quotients, self.gradient_norm(state)

        # On older versions, JAX can differentiate a step in reverse, but not a loop.
        on_tpu = in_place if BackwardPass.is_supported else plain
        return platforms.by_platform(state, tpu=on_tpu, default=plain)

    def _norm_first(
        self, state: TokenAccumulationState, everywhere: bool
    ) -> tuple[jax.Array, TokenAccumulationState]:
        """The gradient's norm, and the state, to be read after it.

        On a TPU, all sums wait for the norm. If it is first `everywhere`, only their
        divisor does on other platforms.
        """

        def by_divisor(
            norm: jax.Array, state: TokenAccumulationState
        ) -> tuple[jax.Array, TokenAccumulationState]:
            if not everywhere:
                return norm, state
            norm, tokens = jax.lax.optimization_barrier((norm, state.acc_tokens))
            return norm, state._replace(acc_tokens=tokens)

        return platforms.by_platform(
            self.gradient_norm(state),
            state,
            tpu=lambda *both: jax.lax.optimization_barrier(both),
            default=by_divisor,
        )

    def gradient_norm(self, state: TokenAccumulationState) -> jax.Array:
        """Global norm of the gradient of a window with tokens.

        Divided after the norm: where the divided gradient has a second reader, XLA
        stores all of it (25 MB instead of 1 KB of temporaries in a 25 MB model).
        """
        norm = sums.norm(state.acc_grads, state.acc_value.dtype)
        return sums.divide(norm, self._divisor(state))

    def _divisor(self, state: TokenAccumulationState) -> jax.Array:
        return self._divisors(state)()

    def _divisors(self, state: TokenAccumulationState) -> Callable[[], jax.Array]:
        """Makes one divisor after the other, all of the same value."""
        tokens = state.acc_tokens
        one = jnp.ones_like(tokens)
        if not self.token_mean:
            return lambda: one
        # Under vmap both sides of the conditional are computed: never divide by 0.
        has_tokens = tokens > 0
        return lambda: jax.lax.select(has_tokens, tokens, one)


def make_accumulation(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    gradients: Literal["sum", "mean"] = "sum",
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: DType | None = None,
    token_mean: bool = True,
) -> Accumulation:
    """Checks the arguments that every public constructor has in common."""
    if gradients not in ("sum", "mean"):
        raise ValueError(
            f"gradients must be 'sum' or 'mean', what they are of: got {gradients!r}."
        )
    if should_skip_update_fn is not None and not callable(should_skip_update_fn):
        raise TypeError(
            "should_skip_update_fn must be a function such as optax.skip_not_finite: "
            f"got {should_skip_update_fn!r}."
        )
    if accumulator_dtype is not None:
        accumulator_dtype = jnp.dtype(accumulator_dtype)
        if not jnp.issubdtype(accumulator_dtype, jnp.inexact):
            raise ValueError(
                "accumulator_dtype must be a floating dtype, to hold sums of "
                f"gradients: got {accumulator_dtype}."
            )
    return Accumulation(
        checks.as_inner_optimizer(inner),
        schedule,
        gradients,
        should_skip_update_fn,
        accumulator_dtype,
        token_mean,
        Layout(),
        ALONE,
    )


def _are_wide(acc: Gradients) -> bool:
    """Whether a quotient is not rounded when it takes the place of a sum."""
    return all(sums.at_least_float32(x.dtype) == x.dtype for x in jax.tree.leaves(acc))


def _as_like(gradient: Gradients, like: Gradients) -> Gradients:
    return jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), gradient, like)
