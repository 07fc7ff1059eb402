"""The exact gradient of a loss that couples the rows of a window."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.accumulation import make_accumulation
from optax_tokenaccum._core.trees import Aux, Batch, DType, ModelState, Params, Tree
from optax_tokenaccum._devices.batch import as_micro_batch
from optax_tokenaccum._devices.mesh import Devices
from optax_tokenaccum._steps import window
from optax_tokenaccum._steps.keywords import as_keywords
from optax_tokenaccum._steps.loss_fn import Loss, describe
from optax_tokenaccum._steps.micro_batch import Setup
from optax_tokenaccum._steps.value_and_grad import without_state


def coupled_value_and_grad(
    summary_fn: Callable[..., Tree],
    loss_fn: Callable[[Tree], Any],
    *,
    has_aux: bool = False,
    accumulator_dtype: DType | None = None,
) -> Callable[..., Any]:
    """Value and gradient of a loss that is not a sum over the rows of a window.

    The loss is `loss_fn` of the stacked `summary_fn(params, batch)` of all
    micro-batches: a contrastive loss with negatives from the whole window, a balance
    loss of the global batch. Memory holds the activations of one micro-batch at a time:
    `summary_fn` runs on each, `loss_fn` is differentiated, and each runs again with its
    backward pass. A sum over rows needs no first run: use `window_value_and_grad`.

    Args:
      summary_fn: `summary_fn(params, batch, **kwargs)` returns a tree of arrays:
        embeddings `[rows, d]`, or a loss sum and a count; integers have no gradient. It
        must be a function of its arguments, because it runs twice. What `loss_fn` needs
        of the parameters and of the batch must be in it, such as a temperature or a
        mask.
      loss_fn: `loss_fn(summaries) -> loss`, where leaves are stacked `[k, ...]`.
      has_aux: `loss_fn` returns `(loss, aux)`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **kwargs) ->
      ((loss, aux), grads)`, for any `jit`, with arguments and `grads` as for
      `window_value_and_grad`, which also cannot be differentiated in reverse. Summaries
      of micro-batches that do not run are zeros.

    Raises:
      ValueError: no floats in a summary; a call in a `shard_map`; or as there.
      TypeError: an argument is not a function, or the loss not a floating scalar.

    Source: GradCache (arXiv 2101.06983), for contrastive losses.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum import coupled_value_and_grad, split_batch
      >>> def embed(w, batch):
      ...     return batch["image"] @ w, batch["text"] @ w
      >>> def contrastive_loss(embeddings):
      ...     image, text = (jnp.concatenate(x) for x in embeddings)  # of all rows
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(image @ text.T)))
      >>> image, text = jax.random.normal(jax.random.key(0), (2, 8, 4))
      >>> batch, w = {"image": image, "text": text}, jnp.eye(4)
      >>> def full_batch_loss(w):
      ...     return contrastive_loss([x[None] for x in embed(w, batch)])
      >>> f = jax.jit(coupled_value_and_grad(embed, contrastive_loss))
      >>> (loss, _), grad = f(w, split_batch(batch, 4))
      >>> print(jnp.allclose(grad, jax.grad(full_batch_loss)(w), rtol=1e-5))
      True
    """
    checks.check_function(summary_fn, "summary_fn")

    def with_state(params: Params, _: None, /, *args: Tree, **kwargs: Tree) -> Any:
        return summary_fn(params, *args, **kwargs), None

    f = of_model_state(with_state, loss_fn, has_aux, accumulator_dtype)
    return without_state(f)


def of_model_state(
    summary_fn: Callable[..., tuple[Tree, ModelState]],
    loss_fn: Callable[[Tree], Any],
    has_aux: bool,
    accumulator_dtype: DType | None,
) -> Callable[..., Any]:
    """The same for `summary_fn(params, model_state, ...) -> (summary, model_state)`."""
    checks.check_function(loss_fn, "loss_fn")
    accumulation = make_accumulation(
        optax.identity(), accumulator_dtype=accumulator_dtype
    )

    def loss_and_aux(summaries: Tree) -> tuple[jax.Array, Aux]:
        returned = loss_fn(summaries)
        if has_aux != (isinstance(returned, tuple | list) and len(returned) == 2):
            form = "(loss, aux)" if has_aux else "loss"
            raise TypeError(
                f"With has_aux={has_aux}, loss_fn must return {form}: got "
                f"{describe(returned)}."
            )
        return returned if has_aux else (returned, None)

    def weighted(
        params: Params, state: ModelState, batch: Batch, /, **kwargs: Tree
    ) -> tuple[tuple[jax.Array | int, int], ModelState]:
        """A sum, with the micro-batch's part of the gradient."""
        rows, weights = batch
        summary, state = summary_fn(params, state, rows, **kwargs)
        floats = [x for x in jax.tree.leaves(summary) if trees.is_float(x)]
        terms = map(_product, map(jnp.asarray, floats), weights)
        return (sum(terms), 1), state

    loss = Loss(weighted, has_aux=False, has_model_state=True)
    setup = Setup(loss, accumulation, Devices())

    def value_and_grad(
        params: Params,
        model_state: ModelState,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: window.Bound = None,
        **kwargs: Tree,
    ) -> Any:
        checks.check_params(params)
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "coupled_value_and_grad in a shard_map: devices would couple their own "
                "rows. Call it in a jit, with a batch that is spread."
            )
        window.check_micro_batches(micro_batches, num_micro_batches)
        keywords = as_keywords(kwargs)

        def summarize(
            i: ArrayLike, batch: Batch, state: ModelState
        ) -> tuple[ModelState, Tree]:
            key = {} if rng is None else {"rng": trees.fold_key(rng, i)}
            # Copies, because summary_fn may assign to them; never NumPy's arithmetic.
            own, given = jax.tree.map(jnp.asarray, (params, keywords))
            summary, state = summary_fn(own, state, batch, **given.build(), **key)
            return state, jax.tree.map(jnp.asarray, summary)

        _, summaries = window.for_each(
            summarize, model_state, micro_batches, num_micro_batches, True, "summary_fn"
        )
        if not any(map(trees.is_float, jax.tree.leaves(summaries))):
            raise ValueError("summary_fn must return an array of floats.")
        differentiate = jax.value_and_grad(loss_and_aux, has_aux=True, allow_int=True)
        values, weights = differentiate(summaries)
        weights = [x for x in jax.tree.leaves(weights) if not trees.is_float0(x)]
        rows = micro_batches, weights
        given = as_micro_batch(rows, rng, keywords, setup.devices, axis=1)
        added = window.run_window(setup, params, model_state, given, num_micro_batches)
        grads = trees.cast_like(added.opt_state.grad_sums, params)
        return (values, added.model_state), grads

    return value_and_grad


@jax.custom_jvp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Zero, with the derivative of `sum(x * weight)`, whose value could be NaN."""
    return jnp.zeros((), jnp.float32)


@_product.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    tangent = jnp.real(tangents[0] * primals[1])
    return jnp.zeros((), jnp.float32), jnp.sum(tangent, dtype=jnp.float32)
