"""The exact mean loss and gradient of a whole window."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.accumulation import make_accumulation
from optax_tokenaccum._devices.batch import as_micro_batch
from optax_tokenaccum._devices.mesh import Devices
from optax_tokenaccum._steps import window
from optax_tokenaccum._steps.keywords import as_keywords
from optax_tokenaccum._steps.loss_fn import Loss, LossFn, unpack
from optax_tokenaccum._steps.micro_batch import Setup, check_own_map

# loss, (num_tokens, aux)
WindowValues = tuple[jax.Array, tuple[jax.Array, trees.Aux]]


Reduce = Literal["mean", "sum"]


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    has_model_state: bool = False,
    reduction: Reduce = "mean",
    accumulator_dtype: trees.DType | None = None,
) -> Callable[..., Any]:
    r"""Like `jax.value_and_grad`, for the exact mean loss of a window.

    The returned function computes
    :math:`\left(\sum_i \ell_i / \sum_i n_i,\; \sum_i \nabla \ell_i / \sum_i n_i\right)`
    over micro-batches with summed losses :math:`\ell_i` and token counts :math:`n_i`.
    Use it if you write your own train step. It runs one loop over the micro-batches,
    and works inside any `jit`. The gradient of an integer parameter is zeros of its
    dtype, which every optimizer accepts.

    The backward pass adds to one buffer of the gradient's size, on jax 0.11 and newer;
    there `vmap`, `jvp` and `jacfwd` of the returned function work, but reverse-mode
    derivatives raise an error ("Linearization failed"). For these, add up
    `jax.value_and_grad` of each micro-batch by hand, or use `token_accumulation`.

    In a `shard_map`, results are those of what `loss_fn` returns. If devices share
    parameters, or the loss reads from other devices, it must return both the loss and
    the count reduced, `jax.lax.psum(..., axis_name)`. A loss of this device's rows
    alone, with `jax.lax.pcast(params, axis_name, to="varying")` or `check_vma=False`,
    gives this device's results. With `reduction="sum"`, `psum(grads) / psum(n)` is then
    the gradient over all rows, reduced once a window.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      has_aux: as for `make_train_step`.
      has_model_state: as for `make_train_step`.
      reduction: `"mean"`, or `"sum"` for `loss` and `grads` that are not divided, to be
        added up over devices, stages or requests, and then divided once. The gradients
        are then in the dtypes of the sums, and a part without tokens keeps a loss that
        is real.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **loss_kwargs) ->
      ((loss, (num_tokens, aux)), grads)`; with `has_model_state`, `f(params,
      model_state, micro_batches, ...) -> (((loss, (num_tokens, aux)), model_state),
      grads)`.

      * `micro_batches`: leaves `[k, micro, ...]`, see `split_batch`.
      * `rng`: one key for this window. `loss_fn` receives it as `rng`, folded with the
        index of the micro-batch. Fold in the number of the update yourself.
      * `num_micro_batches`: runs only the first `num_micro_batches`. The number is
        traced: a different one does not compile again. An array is clipped to the range
        0 to `k`.
      * `loss_kwargs`: passed to `loss_fn` unchanged, not differentiated.
      * `loss`: float32, or wider if a parameter is wider.
      * `num_tokens`: tokens in the window.
      * `aux`: stacked `[k, ...]`, zeros for micro-batches that did not run; or `None`.
      * `grads`: in the parameters' dtypes.

      A window without tokens has a loss and a gradient of 0.

    Raises:
      ValueError: leading axes differ or are 0 (the error names the leaf), or
        `num_micro_batches` is an int outside of 0 to `k`; no parameter reaches
        the loss; or, in a `shard_map`, the loss or the count must be reduced over
        devices, and is not.
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
    _check_reduction(reduction)
    accumulation = make_accumulation(
        optax.identity(), accumulator_dtype=accumulator_dtype
    )
    loss = Loss(loss_fn, has_aux, has_model_state)
    setup = Setup(loss, accumulation, Devices())

    def with_model_state(
        params: trees.Params,
        model_state: trees.ModelState,
        micro_batches: trees.Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: window.Bound = None,
        **loss_kwargs: trees.Tree,
    ) -> Any:
        checks.check_params(params)
        window.check_micro_batches(micro_batches, num_micro_batches)
        keywords = as_keywords(loss_kwargs)
        given = as_micro_batch(micro_batches, rng, keywords, setup.devices, axis=1)
        state, _, aux, model_state = window.run_window(
            setup, params, model_state, given, num_micro_batches
        )
        loss, num_tokens = accumulation.window_so_far(state)
        if reduction == "sum":
            loss, gradient = state.acc_value, _sums_for(params, state.grad_sums)
        else:
            gradient = accumulation.window_gradient_in_place(state, params)
        return ((loss, (num_tokens, aux)), model_state), gradient

    return with_model_state if has_model_state else without_state(with_model_state)


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum': got {reduction!r}.")


def _sums_for(params: trees.Params, sums: trees.Gradients) -> trees.Gradients:
    """The sums, of which those of integers are zeros of their dtype."""

    def sum_for(x: jax.Array, p: jax.Array) -> jax.Array:
        return x if trees.is_float(p) else x.astype(jnp.result_type(p))

    return jax.tree.map(sum_for, sums, params)


def without_state(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of parameters and a model state as one of parameters."""

    def of_params(
        params: trees.Params, micro_batches: trees.Batch, **kwargs: trees.Tree
    ) -> tuple[trees.Tree, trees.Gradients]:
        (values, _), gradient = f(params, None, micro_batches, **kwargs)
        return values, gradient

    return of_params


def accumulate_over_window(
    value_and_grad_fn: Callable[..., Any],
    *,
    gradients: Literal["sum", "mean"] = "sum",
    has_aux: bool = False,
    reduction: Reduce = "mean",
    accumulator_dtype: trees.DType | None = None,
) -> Callable[..., Any]:
    r"""The exact mean loss and gradient of a window, from gradients of micro-batches.

    The returned function computes
    :math:`\left(\sum_i \ell_i / \sum_i n_i,\; \sum_i g_i / \sum_i n_i\right)` over
    micro-batches with summed losses :math:`\ell_i`, their gradients :math:`g_i` and
    token counts :math:`n_i`, in one loop, inside any `jit`.

    Use it if you are handed a function that computes gradients: by a trainer, or
    because you clip or change the gradient of each micro-batch. If you have the loss,
    prefer `window_value_and_grad`: its backward pass adds to the sums, while a gradient
    that is handed over exists as a whole next to them.

    In a `shard_map`, the function must return the value and the count reduced over the
    devices that its gradients are of, as `window_value_and_grad` explains.

    Args:
      value_and_grad_fn: `value_and_grad_fn(params, batch, **kwargs) -> ((value,
        num_tokens), grads)`, as `jax.value_and_grad(loss_fn, has_aux=True)` returns.
        `grads` may be any tree of arrays.
      gradients: `"sum"` if `value` and `grads` are of the loss summed over the
        micro-batch's tokens; `"mean"` if they are of its mean over these tokens. The
        mean of a micro-batch without tokens adds nothing, because it is multiplied by
        its count, 0.
      has_aux: the function returns `((value, (num_tokens, aux)), grads)`.
      reduction: as for `window_value_and_grad`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **kwargs) ->
      ((loss, (num_tokens, aux)), grads)`, with the arguments and results of the
      function that `window_value_and_grad` returns. `grads` has the tree, shapes and
      dtypes of the gradients that `value_and_grad_fn` returns.

    Raises:
      ValueError: as for `window_value_and_grad`; or `gradients` is a different word.
      TypeError: `value_and_grad_fn` returned anything other than described above.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum import accumulate_over_window
      >>> def mean_loss_fn(w, batch):
      ...     n = jnp.sum(batch["mask"])
      ...     return jnp.sum(w * batch["x"] * batch["mask"]) / n, n
      >>> grad_fn = jax.value_and_grad(mean_loss_fn, has_aux=True)  # of a trainer
      >>> micro_batches = {"x": jnp.asarray([[2.0, 0.0, 0.0], [30.0, 30.0, 30.0]]),
      ...                  "mask": jnp.asarray([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
      >>> f = jax.jit(accumulate_over_window(grad_fn, gradients="mean"))
      >>> (loss, (num_tokens, _)), grad = f(jnp.asarray(1.0), micro_batches)
      >>> print(loss, num_tokens, grad)  # not 16, the mean of the means
      23.0 4.0 23.0
    """
    checks.check_function(value_and_grad_fn, "value_and_grad_fn")
    _check_reduction(reduction)
    accumulation = make_accumulation(
        optax.identity(), gradients=gradients, accumulator_dtype=accumulator_dtype
    )
    form = "(value, (num_tokens, aux))" if has_aux else "(value, num_tokens)"
    rule = (
        f"value_and_grad_fn must return ({form}, grads), as "
        "jax.value_and_grad(loss_fn, has_aux=True) does"
    )

    def without_float0(grads: trees.Gradients) -> trees.Gradients:
        """Those of integers are left out: nothing can be added to them."""
        return jax.tree.map(lambda g: None if trees.is_float0(g) else g, grads)

    def accumulate(
        params: trees.Params,
        micro_batches: trees.Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: window.Bound = None,
        **kwargs: trees.Tree,
    ) -> Any:
        window.check_micro_batches(micro_batches, num_micro_batches)

        def call(
            i: ArrayLike, batch: trees.Batch
        ) -> tuple[tuple[jax.Array, ArrayLike, trees.Aux], trees.Gradients]:
            key = {} if rng is None else {"rng": trees.fold_key(rng, i)}
            own = jax.tree.map(lambda x: x, kwargs)  # it may assign to containers
            returned = value_and_grad_fn(params, batch, **own, **key)
            if not isinstance(returned, tuple | list) or len(returned) != 2:
                raise TypeError(f"{rule}: got {returned}.")
            return unpack(returned[0], has_aux, rule), returned[1]

        with window.explained(micro_batches, "value_and_grad_fn"):
            trace = jax.make_jaxpr(call, return_shape=True)
            traced, (values, like) = trace(0, window.micro_batch_at(micro_batches, 0))
        types = traced.out_avals[len(jax.tree.leaves(values)) :]
        check_own_map(traced, types, is_loss=False)
        summed = without_float0(like)
        empty = accumulation.empty_window(summed)

        def add(
            i: ArrayLike, batch: trees.Batch, state: trees.Tree
        ) -> tuple[trees.Tree, trees.Aux]:
            (value, num_tokens, aux), grads = call(i, batch)
            grads = without_float0(grads)
            added = accumulation.add(grads, state, None, num_tokens, value)
            return added.opt_state, aux

        state, aux = window.for_each(
            add, empty, micro_batches, num_micro_batches, has_aux, "value_and_grad_fn"
        )
        loss, num_tokens = accumulation.window_so_far(state)
        if reduction == "sum":
            loss, grads = state.acc_value, _sums_for(summed, state.grad_sums)
        else:
            grads = accumulation.window_gradient(state, summed)
        grads = jax.tree.map(
            lambda x, g: trees.zeros_of(x) if trees.is_float0(x) else g, like, grads
        )
        return (loss, (num_tokens, aux)), grads

    return accumulate
