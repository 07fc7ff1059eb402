"""The exact mean loss and gradient of a whole window, in one program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import Accumulation, make_accumulation
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.loss_fn import (
    Loss,
    LossFn,
    function_loss,
    key_at,
    loss_of,
    unpack,
)
from optax_tokenaccum._core.schedule import make_schedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, Params
from optax_tokenaccum._core.variables import NO_VARIABLES, Variables
from optax_tokenaccum._devices.own_map import SumsInMap, layout_in_map
from optax_tokenaccum._steps.loss_terms import CountFn, LossTerms, split
from optax_tokenaccum._steps.micro_batches import explained, for_each, groups_of


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    count_fn: CountFn | None = None,
    accumulator_dtype: Any = None,
) -> Callable[..., tuple[tuple[jax.Array, tuple[Any, Any]], Any]]:
    r"""Like `jax.value_and_grad`, for the exact mean loss of a window.

    The returned function computes
    :math:`\left(\sum_i \ell_i / \sum_i n_i,\; \sum_i \nabla \ell_i / \sum_i n_i\right)`
    over micro-batches with summed losses :math:`\ell_i` and token counts :math:`n_i`.
    Use it if you write your own train step. It runs one loop over the micro-batches,
    and works inside any `jit`. The gradient of an integer parameter is zeros of its
    dtype, which every optimizer accepts.

    The backward pass adds to one buffer of the gradient's size, on jax 0.11 and newer;
    there `vmap` and `jvp` of the returned function work, but reverse-mode derivatives
    ("Linearization failed") and `vmap` of a `jvp` raise an error. For these, add up
    `jax.value_and_grad` of each micro-batch by hand, or use `token_accumulation`.

    In a `shard_map`, `jax.grad` adds the gradients of all devices with respect to
    parameters that all devices share. In the same way, `loss`, `num_tokens` and `grads`
    are then over the rows of all devices, as soon as one parameter is shared; `loss_fn`
    still returns the loss and the count of this device. They are reduced once, after
    the last micro-batch; `aux` and `rng` are this device's. If every parameter differs,
    `jax.lax.pcast(params, axis_name, to="varying")`, or with `check_vma=False`, the
    results are those of this device. A loss that also reads from other devices, such as
    parts of parameters, must return both numbers reduced with `jax.lax.psum`.

    Args:
      loss_fn: `loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`, the loss
        *summed* over the micro-batch's tokens.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      count_fn: for several losses with different denominators: `count_fn(batch) ->
        {name: count}`. `loss_fn` then returns `{name: loss_sum}`, or with `has_aux`
        `({name: loss_sum}, aux)`. The loss is :math:`\sum_j \sum_i \ell_{ij} / \sum_i
        n_{ij}`; a count of `None` leaves its term undivided. Counts may depend only on
        the batch: they are summed over the window before the first backward pass.
      accumulator_dtype: dtype of the sums; by default float32, or the parameter's dtype
        if that is wider.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **loss_kwargs) ->
      ((loss, (num_tokens, aux)), grads)`.

      * `micro_batches`: leaves `[k, micro, ...]`, see `split_batch`; or a
        `PlannedWindow` of sequences of different lengths, see `pad_window`. In that
        case `k` is its capacity, and `loss_fn` is traced once for each shape.
      * `rng`: one key for this window. `loss_fn` receives it as `rng`, folded with the
        index of the micro-batch. Fold in the number of the update yourself.
      * `num_micro_batches`: runs only the first `num_micro_batches`. The number is
        traced: another number does not compile again. An array is clipped to the range
        0 to `k`.
      * `loss_kwargs`: passed to `loss_fn` unchanged, not differentiated.
      * `loss`: float32, or wider if a parameter is wider.
      * `num_tokens`: tokens in the window; with `count_fn`, a dictionary of totals.
      * `aux`: stacked `[k, ...]`, zeros for micro-batches that did not run; or `None`.
      * `grads`: in the parameters' dtypes.

      A window without tokens has a loss and a gradient of 0.

    Raises:
      ValueError: leading axes differ or are 0 (the error names the leaf), or
        `num_micro_batches` is outside 0 to `k` and not an array; or, in a `shard_map`,
        only one of the loss and the count is reduced over devices, or none of them and
        devices with parameters of their own communicate.
      TypeError: `loss_fn` returned anything other than described above; or `params` is
        an NNX model, and a variable is not an `nnx.Param` or is in two places.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum import window_value_and_grad
      >>> def loss_fn(w, batch):
      ...     return jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])
      >>> micro_batches = {"x": jnp.asarray([[2.0, 0.0, 0.0], [30.0, 30.0, 30.0]]),
      ...                  "mask": jnp.asarray([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
      >>> f = jax.jit(window_value_and_grad(loss_fn))
      >>> (loss, (num_tokens, _)), grad = f(jnp.asarray(1.0), micro_batches)
      >>> print(loss, num_tokens, grad)  # not 16, the mean of the means
      23.0 4.0 23.0
    """
    checks.check_function(loss_fn, "loss_fn")
    window = Window(
        function_loss(loss_fn, has_aux),
        count_fn,
        make_accumulation(
            optax.identity(),
            make_schedule(),
            accumulator_dtype=accumulator_dtype,
            token_mean=count_fn is None,
        ),
    )

    def value_and_grad(
        params: Params,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: Any = None,
        **loss_kwargs: Any,
    ) -> tuple[tuple[jax.Array, tuple[Any, Any]], Any]:
        checks.check_nnx_variables(params)
        given = NO_VARIABLES, rng, num_micro_batches, loss_kwargs
        layout = window.layout_in_map(micro_batches, params, *given)
        state, (totals, *_), aux = window.run(
            layout, micro_batches, layout.own(params), *given
        )
        state = layout.reduced_like(state, params)
        loss, num_tokens = window.accumulation.window_so_far(state)
        num_tokens = num_tokens if count_fn is None else totals
        gradient = window.accumulation.window_gradient_in_place(state, like=params)
        return (loss, (num_tokens, aux)), gradient

    return value_and_grad


@dataclass(frozen=True, eq=False)
class Window:
    """The loop that `window_value_and_grad` and `make_window_step` share."""

    loss: Loss
    count_fn: CountFn | None
    accumulation: Accumulation

    def __post_init__(self) -> None:
        if self.count_fn is not None:
            checks.check_function(self.count_fn, "count_fn")

    def layout_in_map(
        self,
        micro_batches: Batch,
        params: Params,
        variables: Variables,
        rng: jax.Array | None,
        num_micro_batches: Any,
        loss_kwargs: dict[str, Any],
    ) -> SumsInMap:
        """The layout where this is called, perhaps in a `shard_map`."""
        _, groups = groups_of(micro_batches, num_micro_batches)

        def of_first() -> Any:
            batch = groups[0].pick(0)
            kwargs = loss_kwargs | key_at(rng, Layout(), 0)
            returned, _ = self.loss.call(params, variables, batch, **kwargs)
            if self.count_fn is None:
                loss_sum, (num_tokens, _) = unpack(returned, self.loss.has_aux)
                return loss_sum, num_tokens, params
            terms, _ = split(returned, self.loss.has_aux)
            return terms, self.count_fn(batch), params

        return layout_in_map(of_first)

    def run(
        self,
        layout: Layout,
        micro_batches: Batch,
        params: Params,
        variables: Variables,
        rng: jax.Array | None,
        num_micro_batches: Any,
        loss_kwargs: dict[str, Any],
        gradient_step: jax.Array | None = None,
    ) -> tuple[TokenAccumulationState, tuple[Any, jax.Array, Variables], Any]:
        """Runs the micro-batches.

        With a `gradient_step`, `rng` is one key for the whole run, folded as in
        `make_train_step`; without one, it is the key of this window.

        Returns:
          `(state before the close, (num_tokens, any_skipped, variables), aux)`.
        """
        accumulation = self.accumulation.with_layout(layout.in_loop())
        capacity, groups = groups_of(micro_batches, num_micro_batches)

        def with_note(f: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                with explained(micro_batches, args[-1]):
                    return f(*args, **kwargs)

            return called

        loss, totals = Loss(with_note(self.loss.call), self.loss.has_aux), None
        empty = accumulation.empty_window(params)
        if gradient_step is not None:
            empty = empty._replace(gradient_step=gradient_step)
        if self.count_fn is not None:
            count_fn, dtype = with_note(self.count_fn), empty.acc_tokens.dtype
            terms = LossTerms(loss, count_fn, dtype)
            totals = terms.totals(groups, layout)
            loss = terms.share_of(totals)

        def kwargs_at(i: Any, state: TokenAccumulationState) -> dict[str, Any]:
            of_run = state.gradient_step, state.mini_step
            position = (i,) if gradient_step is None else of_run
            return loss_kwargs | key_at(rng, layout, *position)

        def add(batch: Batch, i: Any, carry: Any) -> tuple[Any, Any]:
            state, any_skipped, variables = carry
            kwargs = kwargs_at(i, state)
            of_params = loss_of(loss, params, variables, batch, kwargs, layout)
            state, skipped, (aux, changed) = accumulation.add_loss(
                of_params, state, params
            )
            variables = variables.updated(changed, skipped, layout.shared)
            return (state, any_skipped | skipped, variables), aux

        def aux_of(batch: Batch) -> Any:
            own = variables.with_keys(layout.own_key)
            returned, _ = loss.call(params, own, batch, **kwargs_at(0, empty))
            return unpack(returned, loss.has_aux)[1][1]

        (state, any_skipped, variables), aux = for_each(
            groups,
            add,
            (empty, jnp.zeros((), jnp.bool_), variables),
            aux_of if loss.has_aux else None,
            capacity,
        )
        if totals is None:
            totals = accumulation.window_so_far(state)[1]
        return state, (totals, any_skipped, variables), layout.stacked(aux, 1)
