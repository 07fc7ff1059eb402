"""A backward pass that adds each gradient to its sum as soon as it is computed.

`jax.vjp(...).with_refs` adds gradients to mutable arrays within the backward pass. The
gradient of layers that are stacked for a scan is then added layer by layer. Otherwise
it exists as a whole next to the sums, which costs a second buffer of its size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core import jaxprs, trees
from optax_tokenaccum._core.contribution import usable_tokens
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.sums import Kind, at_least_float32

# In place of a mutable array: the gradient is returned, not added.
_RETURNED = False

# (totals, loss_sum, num_tokens, aux)
Added = tuple[list[jax.Array], jax.Array, Any, Any]


class BackwardPass:
    """The loss of one micro-batch, ready to be differentiated.

    Args:
      loss: `loss(leaves) -> (loss_sum, (num_tokens, aux))`.
      leaves: the parameters.
      totals: their sums.
      kinds: how each of these adds up.
      dtype: of the number of tokens.
      layout: of the sums.

    Raises:
      NotImplementedError: devices communicate in the backward pass. One without tokens
        would not take part, and the others would wait for it forever.
    """

    # Below jax 0.11, two gradients of a scan can be swapped when they are added to
    # mutable arrays, without an error (fixed in jax commit 5991d42590).
    is_supported = jax.__version_info__ >= (0, 11)

    def __init__(
        self,
        loss: Callable[[list[Any]], tuple[Any, tuple[Any, Any]]],
        leaves: list[Any],
        totals: list[jax.Array],
        kinds: list[Kind],
        dtype: Any,
        layout: Layout,
    ):
        self._kinds, self._dtype, self._layout = kinds, dtype, layout
        # A gradient whose first axis is spread over devices would be gathered by a scan
        # over that axis.
        is_whole = layout.has_whole_first_axes(totals)
        self._into_sum = [
            kind.is_gradient and whole and _adds_alike(x, total)
            for x, total, kind, whole in zip(
                leaves, totals, kinds, is_whole, strict=True
            )
        ]
        self._known_tokens: Any = None
        tokens_vary: frozenset[str] = frozenset()

        def traced(leaves: list[Any]) -> Any:
            nonlocal tokens_vary
            loss_sum, (num_tokens, aux) = loss(leaves)
            if trees.is_concrete(num_tokens):
                self._known_tokens, num_tokens = num_tokens, None
            else:
                tokens_vary = trees.varying_axes(num_tokens)
            return loss_sum, (num_tokens, aux)

        # What the loss closes over becomes an argument: custom_vmap maps only these.
        closed, shape = jax.make_jaxpr(traced, return_shape=True)(leaves)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        self._structure = jax.tree.structure(shape)
        communicates = any(
            type(e).__name__ == "NamedAxisEffect" for e in closed.effects
        )
        reduces = any(tokens_vary - trees.varying_axes(x) for x in leaves)
        may_wait = self._known_tokens is None and (communicates or reduces)
        if may_wait:
            raise NotImplementedError

    def add(self, totals: list[jax.Array], leaves: list[Any]) -> Added:
        """Adds the gradients to `totals`.

        A micro-batch without tokens adds nothing, even if its gradients are NaN. What
        was added cannot be taken back, so its backward pass does not run.

        Raises:
          NotImplementedError: no gradient can be added within the backward pass.
        """
        add = _unless_mapped(self._add_within, self._add_after)
        return add(totals, leaves, self._consts)

    def _evaluate(self, leaves: list[Any], consts: list[Any]) -> Any:
        outputs = jax.core.eval_jaxpr(self._jaxpr, consts, *leaves)
        loss_sum, (num_tokens, aux) = jax.tree.unflatten(self._structure, outputs)
        if self._known_tokens is not None:
            num_tokens = self._known_tokens
        return loss_sum, (num_tokens, aux)

    def _add_within(
        self,
        totals: list[jax.Array],
        leaves: list[Any],
        consts: list[Any],
    ) -> Added:
        kinds = self._kinds
        trained = {
            i: _twin(x, totals[i]) if self._into_sum[i] else x
            for i, x in enumerate(leaves)
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        }

        def of_trained(trained: dict[int, Any]) -> Any:
            own = [
                _stand_in(x, trained[i]) if i in trained else x
                for i, x in enumerate(leaves)
            ]
            return self._evaluate(own, consts)

        loss_sum, backward, (num_tokens, aux) = jax.vjp(
            of_trained, trained, has_aux=True
        )
        # JAX fails to add to one array from two inputs of a scan: it raises
        # NotImplementedError for an array that is both scanned over and a constant, and
        # a TypeError about shapes, which might have agreed, for one scanned over twice.
        used_twice = jaxprs.used_twice(backward.jaxpr, list(trained))
        refs = {
            i: jax.new_ref(totals[i])
            for i in trained
            if self._into_sum[i] and i not in used_twice
        }
        if not refs:
            raise NotImplementedError

        def add(refs: dict[int, Any], others: dict[int, Any], seed: Any) -> Any:
            accumulators = {i: refs.get(i, _RETURNED) for i in trained}
            (gradients,) = backward.with_refs(accumulators)(seed)
            return {i: kinds[i].add(x, gradients[i]) for i, x in others.items()}

        has_tokens, any_tokens = self._counts(num_tokens)
        seed = jnp.ones_like(loss_sum)
        others = {i: totals[i] for i in trained if i not in refs}
        others = _run_if(has_tokens, functools.partial(add, refs), others, seed)
        if any_tokens is not has_tokens:
            maxima = {i: x for i, x in others.items() if not kinds[i].is_gradient}
            if maxima:
                only_others = any_tokens & ~has_tokens
                add_maxima = functools.partial(add, {})
                others |= _run_if(only_others, add_maxima, maxima, seed)
        new = others | {i: jax.freeze(ref) for i, ref in refs.items()}
        totals = [new.get(i, total) for i, total in enumerate(totals)]
        return totals, loss_sum, num_tokens, aux

    def _add_after(
        self,
        totals: list[jax.Array],
        leaves: list[Any],
        consts: list[Any],
    ) -> Added:
        """The same with whole gradients, which JAX can differentiate and map."""
        (loss_sum, (num_tokens, aux)), gradients = jax.value_and_grad(
            self._evaluate, has_aux=True, allow_int=True
        )(leaves, consts)
        has_tokens, any_tokens = self._counts(num_tokens)
        totals = [
            kind.added(x, g, has_tokens if kind.is_gradient else any_tokens)
            for x, g, kind in zip(totals, gradients, self._kinds, strict=True)
        ]
        return totals, loss_sum, num_tokens, aux

    def _counts(self, num_tokens: Any) -> tuple[Any, Any]:
        """Whether this device, and whether any device, has tokens."""
        tokens = usable_tokens(num_tokens, self._dtype)
        if self._known_tokens is not None:
            has_tokens = bool(np.asarray(num_tokens) > 0)
            return has_tokens, has_tokens
        of_all = self._layout.sum(tokens)
        has_tokens = tokens > 0
        return has_tokens, has_tokens if of_all is tokens else of_all > 0


def _adds_alike(leaf: Any, total: jax.Array) -> bool:
    """Whether adding to `total` itself rounds as adding in `Kind.add` does."""
    dtype = jnp.result_type(leaf)
    is_wide = at_least_float32(total.dtype) == total.dtype
    are_alike = jnp.iscomplexobj(leaf) == jnp.iscomplexobj(total)
    return jnp.issubdtype(dtype, jnp.inexact) and is_wide and are_alike


def _twin(leaf: Any, total: jax.Array) -> Any:
    """What to differentiate, so that the gradient has the dtype of the sum."""
    if jnp.result_type(leaf) == total.dtype:
        return leaf
    return jnp.zeros_like(leaf, total.dtype)


@jax.custom_jvp
def _stand_in(leaf: Any, twin: Any) -> Any:
    """`leaf`, as a function of `twin`, whose value does not matter."""
    return leaf


@_stand_in.defjvp
def _(primals: Any, tangents: Any) -> Any:
    leaf, _ = primals
    _, tangent = tangents
    return leaf, tangent.astype(leaf.dtype)


def _run_if(pred: Any, f: Callable[[Any, Any], Any], x: Any, seed: jax.Array) -> Any:
    """`f(x, seed)` if `pred`, otherwise `x`, which has the same shapes.

    A loop of zero or one trips: a conditional was 10 % slower. A second trip would have
    another seed. XLA would compute what does not depend on the trip before the loop,
    and hold it.
    """
    if trees.is_concrete(pred):
        return f(x, seed) if pred else x

    def body(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        x, seed = carry
        return f(x, seed), -seed

    return jax.lax.fori_loop(0, pred.astype(jnp.int32), body, (x, seed))[0]


def _unless_mapped(f: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """`f`, replaced under `vmap`, which JAX does not have for mutable arrays.

    Both functions return the same for the same arguments.
    """

    @jax.custom_batching.custom_vmap
    def mapped(*args: Any) -> Any:
        return f(*args)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        outputs = jax.vmap(otherwise, in_axes, axis_size=axis_size)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped
