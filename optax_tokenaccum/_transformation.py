"""`update` of the transformation: zeros, or a window's updates in place of its sums."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import arrays, checks, trees
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import check_only_gradients


@dataclass(frozen=True)
class Transformation:
    """An accumulation in the form of an optax transformation.

    Attributes:
      accumulation: what adds and closes.
    """

    accumulation: Accumulation

    def init(self, params: optax.Params) -> TokenAccumulationState:
        check_only_gradients(params)
        return self.accumulation.init(params)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        num_tokens: Any = None,
        value: Any = None,
        close_window: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, TokenAccumulationState]:
        """See `token_accumulation`."""
        state, _ = self.accumulation.add(updates, state, params, num_tokens, value)
        if value is not None:
            mean_value, _ = self.accumulation.window_so_far(state)
            if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
                mean_value = mean_value.astype(value.dtype)
            extra_args["value"] = mean_value
        closes = self.accumulation.schedule.closes(
            state.mini_step, state.acc_tokens, state.gradient_step, close_window
        )
        return self._close(state, closes, updates, params, extra_args)

    def _close(
        self,
        state: TokenAccumulationState,
        closes: bool | jax.Array,
        like: optax.Updates,
        params: optax.Params | None,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Updates, TokenAccumulationState]:
        """Ends the window where `closes`; the updates are zeros where it does not.

        A conditional stores what it returns. So the updates leave it in the buffers of
        the sums, which mean nothing once their window is closed, and the zeros are
        made outside, where they fuse into what reads them. Zeros that the conditional
        returned cost a buffer of the gradient's size, and made the step of a model of
        six square layers 2.5 times as long.
        """
        inner, sums = self.accumulation.inner, state.acc_grads
        checks.check_inner_state(inner, state.inner_opt_state, sums)
        whole = state._replace(acc_grads=self.accumulation.layout.opened(sums))
        shapes, _ = jax.eval_shape(
            lambda: inner.update(
                self.accumulation.window_gradient(whole, like),
                state.inner_opt_state,
                params,
                **extra_args,
            )
        )
        trees.check_same_tree(
            shapes,
            whole.acc_grads,
            "The inner optimizer must return updates like the parameters",
        )
        in_place = jax.tree.map(_holds, sums, shapes)
        empty = jax.tree.map(
            lambda fits, acc, u: acc if fits else arrays.zeros_of(u),
            in_place,
            sums,
            shapes,
        )
        held, state = self.accumulation.close(
            state,
            closes,
            like,
            params,
            extra_args,
            finish=lambda updates, _: arrays.cast_like(updates, empty),
            otherwise=empty,
        )

        def update_of(fits: bool, x: jax.Array, u: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.where(state.has_updated, x, 0).astype(u.dtype) if fits else x

        updates = jax.tree.map(update_of, in_place, held, shapes)
        sums = jax.tree.map(
            lambda fits, x, acc: x if fits else acc, in_place, held, sums
        )
        return updates, state._replace(acc_grads=sums)


def _holds(acc: jax.Array, update: jax.ShapeDtypeStruct) -> bool:
    """Whether the buffer of a sum holds an update to the last bit."""
    if acc.shape != update.shape:  # a device's own sum, of another type than a total
        return False
    if acc.dtype == update.dtype:
        return True
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (acc, update)):
        return False
    return acc.dtype.itemsize >= max(update.dtype.itemsize, 4)
