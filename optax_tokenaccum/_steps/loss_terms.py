"""Several losses in one window, each divided by its own denominator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_tokenaccum._core.contribution import as_num_tokens, usable_tokens
from optax_tokenaccum._core.layout import Computed, Peers
from optax_tokenaccum._core.loss import Loss
from optax_tokenaccum._core.sums import divide
from optax_tokenaccum._core.trees import Batch, M, P
from optax_tokenaccum._steps.micro_batches import Group, Index, Pick, loop

# By the name of a loss; a loss without a count stays undivided.
Counts = dict[str, jax.Array | None]
# count_fn(batch) -> {name: count of that loss in the batch, or None}
CountFn = Callable[[Batch], dict[str, ArrayLike | None]]


@dataclass(frozen=True)
class LossTerms:
    r"""Turns `loss_fn(params, batch) -> {name: loss_sum}` into a single loss.

    The loss of the window is
    :math:`\sum_j \left(\sum_i \ell_{ij} / N_j\right)` with :math:`N_j = \sum_i n_{ij}`.
    Gradients of terms with different denominators cannot share an accumulator and be
    divided at the end. If the totals are known first, each micro-batch's loss is
    divided immediately, and one accumulator is enough. That is why a count may depend
    only on the batch: `count_fn` is not given the parameters.
    """

    loss: Loss
    count_fn: CountFn
    count_dtype: DTypeLike

    def totals(self, groups: list[Group], peers: Peers) -> Counts:
        """Sums the count of each term over the micro-batches that run."""

        def add(pick: Pick, i: Index, so_far: Counts) -> Counts:
            return jax.tree.map(jnp.add, so_far, self._counts(pick(i)))

        def of_rows(_: optax.Params, batch: Batch, rng: jax.Array | None) -> Computed:
            named = self._counts(batch).items()
            return Computed({f"the count {n!r}": x for n, x in named if x is not None})

        peers.check_counts(of_rows, (), groups[0].pick(0), None)
        shapes = jax.eval_shape(lambda: self._counts(groups[0].pick(0)))
        return peers.sum(loop(groups, add, jax.tree.map(jnp.zeros_like, shapes)))

    def share_of(self, totals: Counts) -> Loss:
        """Returns a micro-batch's share of the window's loss.

        Its `num_tokens` is 1, or 0 if every count of the micro-batch is 0. As
        everywhere, a micro-batch with 0 tokens adds nothing.
        """

        def share(params: P, model_state: M, batch: Batch, **kwargs: Any) -> Any:
            returned, new = self.loss.call(params, model_state, batch, **kwargs)
            terms, aux = split(returned, self.loss.has_aux)
            _check_names(terms, totals)
            loss = sum(_divided(terms[name], total) for name, total in totals.items())
            counts = self._counts(batch).values()
            holds_any = jnp.asarray([True if n is None else n > 0 for n in counts])
            num_tokens = holds_any.any().astype(jnp.float32)
            return (loss, (num_tokens, aux) if self.loss.has_aux else num_tokens), new

        return replace(self.loss, call=share)

    def _counts(self, batch: Batch) -> Counts:
        counts = self.count_fn(batch)
        if not isinstance(counts, dict) or not counts:
            raise TypeError(
                "count_fn must return a dictionary {name: count or None}, one for each "
                f"loss: got {type(counts).__name__}."
            )

        def usable(name: str, count: ArrayLike) -> jax.Array:
            n = as_num_tokens(count, f"the count {name!r}", self.count_dtype)
            return usable_tokens(n, self.count_dtype)

        return {n: None if x is None else usable(n, x) for n, x in counts.items()}


def split(returned: Any, has_aux: bool) -> tuple[Any, Any]:
    """`(terms, aux)` of a `loss_fn` with several losses."""
    if not has_aux:
        return returned, None
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "With count_fn and has_aux, loss_fn must return ({name: loss_sum}, "
            f"aux): got {type(returned).__name__}."
        )
    return returned


def _divided(term: ArrayLike, total: jax.Array | None) -> jax.Array:
    term = jnp.asarray(term)
    if total is None:
        return term
    return jnp.where(total > 0, divide(term, jnp.where(total > 0, total, 1)), 0)


def _check_names(terms: Any, totals: Counts) -> None:
    if not isinstance(terms, dict):
        raise TypeError(
            "With count_fn, loss_fn must return a dictionary {name: loss_sum}: got "
            f"{type(terms).__name__}."
        )
    if terms.keys() != totals.keys():
        raise ValueError(
            "Every loss needs a count and every count a loss, by the same name: got "
            f"losses {sorted(terms)} and counts {sorted(totals)}. A count must come "
            "from the batch alone; where it depends on the model no single pass can "
            "divide by it: give None and divide by something known."
        )
