"""The exact mean loss and gradient of a whole window, in one program."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from optax_tokenaccum import _trees as trees
from optax_tokenaccum._accumulation import Accumulation, make_accumulation
from optax_tokenaccum._checks import as_count, check_function, check_params
from optax_tokenaccum._devices import Devices, Shardings, entries_of, over_devices
from optax_tokenaccum._loss import (
    Keywords,
    Loss,
    LossFn,
    MicroBatch,
    Output,
    add_micro_batch,
    check_own_map,
    unpack,
)
from optax_tokenaccum._rows import spread
from optax_tokenaccum._scans import Traced
from optax_tokenaccum._schedule import make_schedule
from optax_tokenaccum._trees import (
    Aux,
    Batch,
    DType,
    Gradients,
    ModelState,
    Params,
    Tree,
)

# loss, (num_tokens, aux)
WindowValues = tuple[jax.Array, tuple[jax.Array, Aux]]
Bound = ArrayLike | None  # of the micro-batches that run
STACK = (
    "A list of micro-batches must be stacked into one tree: jax.tree.map(lambda *xs: "
    "jnp.stack(xs), *micro_batches). For different shapes use make_train_step, which "
    "takes one micro-batch per call."
)


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    has_model_state: bool = False,
    accumulator_dtype: DType | None = None,
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
    gives this device's results. `psum(n * grads) / psum(n)` is then the gradient over
    all rows, reduced once a window.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      has_aux: as for `make_train_step`.
      has_model_state: as for `make_train_step`.
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
        traced: another number does not compile again. An array is clipped to the range
        0 to `k`.
      * `loss_kwargs`: passed to `loss_fn` unchanged, not differentiated.
      * `loss`: float32, or wider if a parameter is wider.
      * `num_tokens`: tokens in the window.
      * `aux`: stacked `[k, ...]`, zeros for micro-batches that did not run; or `None`.
      * `grads`: in the parameters' dtypes.

      A window without tokens has a loss and a gradient of 0.

    Raises:
      ValueError: leading axes differ or are 0 (the error names the leaf), or
        `num_micro_batches` is outside 0 to `k` and not an array; or, in a `shard_map`,
        the loss or the count must be reduced over devices, and is not.
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
    check_function(loss_fn, "loss_fn")
    loss = Loss(loss_fn, has_aux, has_model_state)
    accumulation = make_accumulation(
        optax.identity(), make_schedule(), accumulator_dtype=accumulator_dtype
    )

    def with_model_state(
        params: Params,
        model_state: ModelState,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: Bound = None,
        **loss_kwargs: Any,
    ) -> Any:
        check_params(params)
        rows = spread(micro_batches, Devices(), 1)
        given = MicroBatch(rows, rng, Keywords(loss_kwargs))
        state, model_state, _, aux = run_window(
            loss, accumulation, Devices(), given, params, model_state, num_micro_batches
        )
        mean, num_tokens = accumulation.window_so_far(state)
        gradient = accumulation.window_gradient_in_place(state, params)
        return ((mean, (num_tokens, aux)), model_state), gradient

    def without_model_state(params: Params, micro_batches: Batch, **kwargs: Any) -> Any:
        (values, _), gradient = with_model_state(params, None, micro_batches, **kwargs)
        return values, gradient

    return with_model_state if has_model_state else without_model_state


def run_window(
    loss: Loss,
    accumulation: Accumulation,
    devices: Devices,
    micro_batches: MicroBatch,
    params: Params,
    model_state: ModelState,
    num_micro_batches: Bound,
    gradient_step: jax.Array | None = None,
    shardings: Shardings = None,
) -> Output:
    """Runs the micro-batches, from an empty window to one that may be closed.

    With a `gradient_step`, the key is one for the whole run, folded as in
    `make_train_step`; without one, it is the key of this window.
    """
    rows = micro_batches.rows
    capacity = check_micro_batches(rows.batch, num_micro_batches)
    batch = jax.tree.map(jnp.asarray, rows.batch)

    def at(i: ArrayLike, mini_step: ArrayLike) -> MicroBatch:
        own = dataclasses.replace(rows, batch=taken(batch, i), axis=0)
        run = () if gradient_step is None else (gradient_step,)
        return micro_batches._replace(rows=own).at(*run, mini_step)

    axes: dict[int, int] = {}
    has_layers = max(map(jnp.ndim, jax.tree.leaves(params)), default=0) > 2
    if has_layers and accumulation.should_skip_update_fn is None:
        first = at(0, 0)
        with explained(rows.batch, first.rows.batch):
            axes = axes_of_layers(loss, devices, params, model_state, first)
    loss = dataclasses.replace(loss, loss_fn=of_turned(loss.loss_fn, axes))
    params, shardings = turned(params, axes), turned_shardings(shardings, axes, params)
    sums = devices.zeros(params, accumulation.dtypes(params))
    empty = accumulation.empty_window(params, sums)
    if gradient_step is not None:
        empty = empty._replace(gradient_step=gradient_step)

    def add(i: ArrayLike, carry: Tree) -> tuple[Tree, Aux]:
        state, model_state, any_skipped = carry
        own = at(i, state.mini_step)
        with explained(rows.batch, own.rows.batch):
            added = add_micro_batch(
                loss,
                accumulation,
                devices,
                state,
                own,
                params,
                model_state,
                shardings,
                sums_are_zeros=True,
            )
        carry = added.opt_state, added.model_state, any_skipped | added.skipped
        return carry, added.aux

    carry = empty, model_state, jnp.zeros((), jnp.bool_)
    (state, model_state, skipped), aux = for_each(
        add, carry, capacity, num_micro_batches, has_aux=loss.has_aux
    )
    lead = len(devices.lead)
    sums = turned(state.acc_grads, axes, back=True, lead=lead)
    state = state._replace(acc_grads=sums)
    return Output(state, model_state, skipped, aux)


# Layers may be stacked along an axis that is not the first, such as MaxText's
# `param_scan_axis=1`. They are transposed before the scan, and so is their gradient
# after it, as a whole. During a window the sums are turned instead, once at its end.


def axes_of_layers(
    loss: Loss,
    devices: Devices,
    params: Params,
    model_state: ModelState,
    micro_batch: MicroBatch,
) -> dict[int, int]:
    """The axes of parameters, by their leaves, along which scans take layers."""
    axes: dict[int, int] = {}

    def look(params: Params, *args: Any) -> None:
        axes.update(Traced(loss, params, *args).axes_of_layers(params))

    rows, rng, loss_kwargs = micro_batch
    if devices.lead:  # where the loss may ask for the device's place
        none, own = PartitionSpec(), rows.specs()
        specs = none, none, own, none, none
        look = over_devices(look, devices.mesh, devices.names, specs, none)
    jax.eval_shape(look, params, model_state, rows.batch, rng, loss_kwargs)
    return axes


def turned(
    tree: Params, axes: dict[int, int], *, back: bool = False, lead: int = 0
) -> Params:
    """A tree like the parameters with these axes first; `back` is the inverse.

    Before those of a parameter, a leaf may have `lead` axes.
    """
    leaves, structure = jax.tree.flatten(tree)
    for i, axis in axes.items():
        ends = (lead, lead + axis) if back else (lead + axis, lead)
        leaves[i] = jnp.moveaxis(leaves[i], *ends) if axis else leaves[i]
    return structure.unflatten(leaves)


def turned_shardings(
    shardings: Shardings, axes: dict[int, int], params: Params
) -> Shardings:
    if shardings is None:
        return None
    leaves, ranks = [*shardings], [*map(jnp.ndim, jax.tree.leaves(params))]
    for i, axis in axes.items():
        sharding = leaves[i]
        if axis and sharding is not None:
            spec = entries_of(sharding, ranks[i])
            spec.insert(0, spec.pop(axis))
            leaves[i] = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return leaves


def of_turned(loss_fn: LossFn, axes: dict[int, int]) -> Callable[..., Any]:
    """The same loss, of parameters that are turned."""

    def of_turned(params: Params, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(turned(params, axes, back=True), *args, **kwargs)

    return of_turned if any(axes.values()) else loss_fn


def taken(micro_batches: Batch, i: ArrayLike) -> Batch:
    """The micro-batch at an index of a stacked window."""

    def take(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map(take, micro_batches)


def for_each(
    add: Callable[[ArrayLike, Tree], tuple[Tree, Aux]],
    carry: Tree,
    capacity: int,
    num_micro_batches: Bound,
    *,
    has_aux: bool,
) -> tuple[Tree, Aux]:
    """Runs `add(i, carry) -> (carry, aux)`; `aux` is stacked `[capacity, ...]`."""
    bound: Any = capacity
    if num_micro_batches is not None:
        bound = jnp.asarray(num_micro_batches)  # all numbers share one program
        if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
            raise TypeError(
                "num_micro_batches must be an integer scalar: got "
                f"{bound.dtype} of shape {bound.shape}."
            )
        bound = jnp.clip(bound.astype(jnp.int32), 0, capacity)
    stacks = None
    if has_aux:
        _, shapes = jax.eval_shape(add, 0, carry)
        stacks = jax.tree.map(functools.partial(_stack_of_zeros, capacity), shapes)

    def body(i: ArrayLike, so_far: Tree) -> Tree:
        def put(xs: jax.Array, x: jax.Array) -> jax.Array:
            return xs.at[i].set(x, mode="promise_in_bounds")

        carry, stacks = so_far
        carry, aux = add(i, carry)
        return carry, jax.tree.map(put, stacks, aux) if has_aux else None

    so_far = trees.as_returned(functools.partial(body, 0), (carry, stacks))
    return jax.lax.fori_loop(0, bound, body, so_far)


def _stack_of_zeros(capacity: int, x: jax.ShapeDtypeStruct) -> jax.Array:
    zeros, sharding = jnp.zeros((capacity, *x.shape), x.dtype), trees.sharding_of(x)
    if sharding is None:
        return zeros
    return jax.sharding.reshard(zeros, PartitionSpec(None, *sharding.spec))


def check_micro_batches(micro_batches: Batch, num_micro_batches: Bound) -> int:
    """The number of micro-batches that the window has room for."""
    try:
        k = trees.leading_axis(micro_batches, "micro_batches")
    except ValueError as error:
        if _is_list_of_trees(micro_batches):
            error.add_note(STACK)
        raise
    is_array = isinstance(num_micro_batches, jax.Array | jax.ShapeDtypeStruct)
    if num_micro_batches is None or is_array:
        return k
    given = as_count(num_micro_batches, "num_micro_batches", least=0)
    if given > k:
        raise ValueError(
            f"num_micro_batches must be at most the {k} micro-batches there are: got "
            f"{given}."
        )
    return k


@contextlib.contextmanager
def explained(
    micro_batches: Batch, given: Batch, name: str = "loss_fn"
) -> Iterator[None]:
    """Adds a note with the shapes of `given`, a part of a stacked window, to errors."""
    try:
        yield
    except Exception as error:
        shapes = ", ".join(
            f"{jnp.shape(x)} at {path}" for path, x in trees.named_leaves(given)
        )
        error.add_note(
            f"micro_batches must have leaves [k, micro, ...], and {name} is given "
            f"[micro, ...] of these: got shape {shapes}. split_batch(batch, k) makes "
            "them of a batch [k * micro, ...]."
        )
        if _is_list_of_trees(micro_batches):
            error.add_note(STACK)
        raise


def _is_list_of_trees(micro_batches: Batch) -> bool:
    """Whether this may be a list of micro-batches; it may also be a batch of trees."""
    if not isinstance(micro_batches, list | tuple) or hasattr(micro_batches, "_fields"):
        return False
    structures = {jax.tree.structure(x) for x in micro_batches}
    return len(structures) == 1 and not jax.tree_util.treedef_is_leaf(*structures)


def accumulate_over_window(
    value_and_grad_fn: Callable[..., Any],
    *,
    gradients: Literal["sum", "mean"] = "sum",
    has_aux: bool = False,
    accumulator_dtype: DType | None = None,
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
    devices that its gradients are of, as `window_value_and_grad` explains. With
    `check_vma=False`, nothing tells which devices these are: without tokens of its own,
    a device then drops the gradients that others send it.

    Args:
      value_and_grad_fn: `value_and_grad_fn(params, batch, **kwargs) -> ((value,
        num_tokens), grads)`, as `jax.value_and_grad(loss_fn, has_aux=True)` returns.
        `grads` may be any tree of arrays.
      gradients: `"sum"` if `value` and `grads` are of the loss summed over the
        micro-batch's tokens; `"mean"` if they are of its mean over these tokens.
      has_aux: the function returns `((value, (num_tokens, aux)), grads)`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **kwargs) ->
      ((loss, (num_tokens, aux)), grads)`, with the arguments and results of the
      function that `window_value_and_grad` returns. `grads` has the tree, shapes and
      dtypes of the gradients that `value_and_grad_fn` returns.

    Raises:
      ValueError: as for `window_value_and_grad`; or `gradients` is another word.
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
    check_function(value_and_grad_fn, "value_and_grad_fn")
    accumulation = make_accumulation(
        optax.identity(), make_schedule(), gradients, None, accumulator_dtype
    )

    def accumulate(
        params: Params,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: Bound = None,
        **kwargs: Any,
    ) -> Any:
        capacity = check_micro_batches(micro_batches, num_micro_batches)
        batches = jax.tree.map(jnp.asarray, micro_batches)

        def call(i: jax.typing.ArrayLike) -> Any:
            batch = taken(batches, i)
            key = {} if rng is None else {"rng": jax.random.fold_in(rng, i)}
            with explained(micro_batches, batch):
                returned = value_and_grad_fn(params, batch, **kwargs, **key)
            return _unpack(returned, has_aux)

        traced, (values, like) = jax.make_jaxpr(call, return_shape=True)(0)
        types = traced.out_avals[len(jax.tree.leaves(values)) :]
        check_own_map(traced, types, is_loss=False)
        summed = _without_float0(like)
        empty = accumulation.empty_window(summed, accumulation.zeros(summed))

        def add(i: Any, state: Tree) -> tuple[Tree, Aux]:
            (value, num_tokens, aux), grads = call(i)
            grads = _without_float0(grads)
            added = accumulation.add(grads, state, None, num_tokens, value)
            return added.state, aux

        state, aux = for_each(add, empty, capacity, num_micro_batches, has_aux=has_aux)
        loss, num_tokens = accumulation.window_so_far(state)
        # A loop could not be differentiated in reverse.
        grads = jax.lax.cond(
            state.acc_tokens > 0,
            lambda: accumulation.window_gradient(state, summed),
            lambda: trees.cast_like(state.acc_grads, summed),
        )
        grads = jax.tree.map(
            lambda x, g: trees.zeros_of(x) if trees.is_float0(x) else g, like, grads
        )
        return (loss, (num_tokens, aux)), grads

    return accumulate


def _unpack(returned: Tree, has_aux: bool) -> Any:
    form = "(value, (num_tokens, aux))" if has_aux else "(value, num_tokens)"
    rule = (
        f"value_and_grad_fn must return ({form}, grads), as "
        "jax.value_and_grad(loss_fn, has_aux=True) does"
    )
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"{rule}: got {returned}.")
    value, grads = returned
    return unpack(value, has_aux, rule), grads


def _without_float0(grads: Gradients) -> Gradients:
    """`grads` without those of integers, which nothing can be added to."""
    return jax.tree.map(lambda g: None if trees.is_float0(g) else g, grads)
