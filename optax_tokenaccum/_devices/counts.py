"""Checks that a loss on one device neither communicates nor counts for all devices.

Under a `shard_map` that checks types, the types show this. In a step they carry no
marks, so the trace of the loss is inspected.
"""

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from optax_tokenaccum._core.dependence import Graph, are_alike, exchanges
from optax_tokenaccum._core.layout import Computed
from optax_tokenaccum._core.trees import Batch, Params, is_concrete


def check_counts(
    f: Callable[[Params, Batch, jax.Array | None], Computed],
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

    def of_rows(rows: dict[int, Any], rng: jax.Array | None, params: Params) -> Any:
        whole = [rows.get(i, x) for i, x in enumerate(leaves)]
        return f(params, jax.tree.unflatten(structure, whole), rng)

    traced, shapes = jax.make_jaxpr(of_rows, return_shape=True)(rows, rng, params)
    names, number = [*shapes.counts, *shapes.same], len(shapes.counts)
    _check_exchanges(traced, "", axes)
    if jax.tree.leaves(params):

        def loss(params: Params) -> Any:
            outputs = jaxpr_as_fun(traced)(*jax.tree.leaves((rows, rng, params)))
            return outputs[len(names)]

        backward = jax.make_jaxpr(jax.grad(loss, allow_int=True))(params)
        _check_exchanges(backward, " in its backward pass", axes)
    size = jax.lax.axis_size(axes)
    if size == 1:
        return
    graph, own = Graph(traced), len(jax.tree.leaves((rows, rng)))
    of_same = range(number, len(names))
    if _is_own(graph, of_same, own):
        refuse_own(next(names[i] for i in of_same if _is_own(graph, [i], own)))
    suspects = [i for i in range(number) if _is_shared(graph, i, own)]
    if not suspects:
        return
    twice = {
        i: jax.ShapeDtypeStruct(
            (2 * x.shape[0], *x.shape[1:]), x.dtype, weak_type=jax.typeof(x).weak_type
        )
        for i, x in rows.items()
    }
    try:
        twin = Graph(jax.make_jaxpr(of_rows)(twice, rng, params))
    except Exception:  # the loss accepts only this number of rows
        twin = None
    for i in suspects:
        if twin is None or are_alike(graph, twin, i):
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


def _is_own(graph: Graph, outputs: Collection[int], own: int) -> bool:
    """Whether some of `outputs` may differ from device to device.

    They may if they need one of the first `own` inputs, or the device's place.
    """
    inputs, operations, _ = graph.slice_of(outputs)
    asks = any(name == "axis_index" or "callback" in name for name in operations)
    return asks or any(inputs[:own])


def _is_shared(graph: Graph, i: int, own: int) -> bool:
    """Whether output `i` is neither a device's own nor a constant."""
    inputs, _, constants = graph.slice_of([i])
    is_constant = all(map(is_concrete, constants)) and not any(inputs)
    return not is_constant and not _is_own(graph, [i], own)


def _check_exchanges(traced: ClosedJaxpr, where: str, axes: tuple[str, ...]) -> None:
    for name, along in exchanges(traced):
        if not along.isdisjoint(axes):
            raise ValueError(
                "loss_fn must not name the data axes: it is given the rows of one "
                "device, and the sums of all are added up after it. Got a "
                f"{name} over {sorted(along)}{where}. Return this device's sums."
            )
