"""Checks that a loss on one device neither communicates nor counts for all devices.

Under a `shard_map` that checks types, the types show this. In a step they carry no
marks, so the trace of the loss is inspected.
"""

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax

from optax_tokenaccum._core.dependence import (
    are_alike,
    exchanges,
    needed_by,
    only,
    slice_of,
)
from optax_tokenaccum._core.layout import Computed
from optax_tokenaccum._core.trees import Batch, Params, is_concrete


def check_counts(
    f: Callable[[Params, Batch, Any], Computed],
    params: Params,
    batch: Batch,
    rng: jax.Array | None,
    axes: tuple[str, ...],
    copies: frozenset[int],
) -> None:
    """Raises if a count, added up over devices, would not count the whole batch.

    A count must depend on the device's own rows, on their number, or on the device's
    own key. A count that depends only on other inputs, for example on a scalar of the
    batch, is the same number on all devices and would be added once per device. A
    constant may come from the shape of the rows, so it is accepted as the device's own.
    Neither `f` nor its backward pass may communicate along `axes`: sums would be added
    up twice. Values that are neither averaged nor added up must not depend on the rows.

    Args:
      f: computes the counts and such values.
      params: the parameters; without any, `f` is not differentiated.
      batch: the device's part of the batch.
      rng: the device's own key.
      axes: the axes over which rows are spread.
      copies: the indices of the leaves of `batch` that are the same on all devices.
    """
    leaves, structure = jax.tree.flatten(batch)
    rows = {i: x for i, x in enumerate(leaves) if i not in copies}
    counts: list[str] = []
    same: list[str] = []

    def of_rows(rows: dict[int, Any], rng: jax.Array | None, params: Params) -> Any:
        whole = [rows.get(i, x) for i, x in enumerate(leaves)]
        found = f(params, jax.tree.unflatten(structure, whole), rng)
        counts[:], same[:] = found.counts, found.same
        return (
            [*found.counts.values(), *found.same.values()],
            found.loss_sum,
            found.rest,
        )

    traced = jax.make_jaxpr(of_rows)(rows, rng, params)
    _check_exchanges(traced, "", axes)
    names = [*counts, *same]
    if jax.tree.leaves(params):

        def loss(params: Params) -> Any:
            arguments = jax.tree.leaves((rows, rng, params))
            return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *arguments)[
                len(names)
            ]

        backward = jax.make_jaxpr(jax.grad(loss, allow_int=True))(params)
        _check_exchanges(backward, " in its backward pass", axes)
    size = jax.lax.axis_size(axes)
    if size == 1:
        return
    own = len(jax.tree.leaves((rows, rng)))
    of_same = range(len(counts), len(names))
    for i in of_same if _is_own(traced, of_same, own) else ():
        if _is_own(traced, [i], own):
            refuse_own(names[i])
    suspects = [i for i in range(len(counts)) if _is_shared(traced, i, own)]
    if not suspects:
        return
    twice = {
        i: jax.ShapeDtypeStruct(
            (2 * x.shape[0], *x.shape[1:]), x.dtype, weak_type=jax.typeof(x).weak_type
        )
        for i, x in rows.items()
    }
    try:
        twin = jax.make_jaxpr(of_rows)(twice, rng, params)
    except Exception:  # the loss accepts only this number of rows
        twin = None
    for i in suspects:
        if twin is None or are_alike(traced, twin, i):
            raise ValueError(
                f"{names[i]} must be a count of the rows that loss_fn is given, those "
                "of one device, because the counts of all devices are added up: got a "
                "number that does not depend on these rows and would be added "
                f"{size} times. Sum their mask in loss_fn; multiply a weight that all "
                "rows share by mask.sum()."
            )


def refuse_own(name: str) -> NoReturn:
    """Raises `ValueError` for a value of which each device has its own."""
    raise ValueError(
        f"{name} must be the same on all devices, because the model has only one: got "
        "a value that depends on the rows of the batch, which differ from device to "
        "device, and no mean of it can be taken. Return it as aux, or use "
        'reduce_every="micro_batch", where loss_fn sees all rows.'
    )


def _is_own(traced: Any, outputs: Collection[int], own: int) -> bool:
    """Whether some of `outputs` may differ from device to device.

    They may if they need one of the first `own` inputs, or the device's place.
    """
    needed = only(traced, outputs)
    operations, _ = needed_by(traced, needed)
    asks = any(name == "axis_index" or "callback" in name for name in operations)
    return asks or any(slice_of(traced, needed).inputs[:own])


def _is_shared(traced: Any, i: int, own: int) -> bool:
    """Whether output `i` is neither a device's own nor a constant."""
    if _is_own(traced, [i], own):
        return False
    needed = only(traced, [i])
    _, constants = needed_by(traced, needed)
    return not all(map(is_concrete, constants)) or any(slice_of(traced, needed).inputs)


def _check_exchanges(traced: Any, where: str, axes: tuple[str, ...]) -> None:
    for name, along in exchanges(traced):
        if not along.isdisjoint(axes):
            raise ValueError(
                "loss_fn must not name the data axes: it is given the rows of one "
                "device, and the sums of all are added up after it. Got a "
                f"{name} over {sorted(along)}{where}. Return this device's sums."
            )
