"""Checks that a loss on one device neither communicates nor counts for all devices.

Under a `shard_map` that checks types, the types show this. In a step they carry no
marks, so the trace of the loss is inspected.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_tokenaccum._core.dependence import depends, functions_in
from optax_tokenaccum._core.trees import Batch, is_concrete


def check_counts(
    f: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any], Any]],
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
    `f` must not communicate along `axes` either: its sums would be added up twice.
    Values that are neither averaged nor added up must not depend on the rows at all.

    Args:
      f: `f(batch, rng)` returns counts and such values, by their names in errors, and
        everything else that it computes.
      batch: the device's part of the batch.
      rng: the device's own key.
      axes: the axes over which rows are spread.
      copies: the indices of the leaves of `batch` that are the same on all devices.
    """
    leaves, structure = jax.tree.flatten(batch)
    rows = {i: x for i, x in enumerate(leaves) if i not in copies}
    names: list[str] = []
    shared_names: list[str] = []

    def of_rows(rows: dict[int, Any], rng: jax.Array | None) -> Any:
        whole = [rows.get(i, x) for i, x in enumerate(leaves)]
        counts, shared, rest = f(jax.tree.unflatten(structure, whole), rng)
        names[:], shared_names[:] = counts, shared
        return [*counts.values()], [*shared.values()], rest

    traced = jax.make_jaxpr(of_rows)(rows, rng)
    for name, along in _exchanges(traced.jaxpr):
        if not along.isdisjoint(axes):
            raise ValueError(
                "loss_fn must not name the data axes: it is given the rows of one "
                "device, and the sums of all are added up after it. Got a "
                f"{name} over {sorted(along)}. Return this device's sums."
            )
    size = jax.lax.axis_size(axes)
    if size == 1:
        return
    of_own = depends(traced, [True] * len(traced.in_avals))[len(names) :]
    for name, is_own in zip(shared_names, of_own, strict=False):
        if is_own:
            raise ValueError(
                f"{name} must be the same on all devices, because the model has only "
                "one: got a value that depends on the rows of the batch, which differ "
                "from device to device, and no mean of it can be taken. Return it as "
                'aux, or use reduce_every="micro_batch", where loss_fn sees all rows.'
            )
    for name in _alike(of_rows, traced, names, rows, rng):
        raise ValueError(
            f"{name} must be a count of the rows that loss_fn is given, those of one "
            "device, because the counts of all devices are added up: got a number that "
            f"does not depend on these rows and would be added {size} times. Sum their "
            "mask in loss_fn; multiply a weight that all rows share by their number."
        )


def _alike(
    f: Callable[..., Any],
    traced: Any,
    names: list[str],
    rows: dict[int, Any],
    rng: jax.Array | None,
) -> Iterator[str]:
    """Yields the names of the counts (first outputs) that are equal on all devices."""
    own = [True] * len(traced.in_avals)
    of_own = depends(traced, own)[: len(names)]
    if all(of_own):
        return
    shared = [not is_concrete(x) for x in traced.consts]
    of_shared = depends(traced, [False] * len(own), shared)
    if not any(of_shared[: len(names)]):
        return
    twice = {
        i: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)
        for i, x in rows.items()
    }
    try:
        twin = jax.make_jaxpr(f)(twice, rng)
    except Exception:  # the loss accepts only this number of rows: no twin
        return
    of_number = depends(traced, own, twin=twin)
    for i, name in enumerate(names):
        if of_shared[i] and not of_number[i]:
            yield name


def _exchanges(jaxpr: Any) -> Iterator[tuple[str, set[str]]]:
    """Yields the collective operations in a traced function, with their axes."""
    for equation in jaxpr.eqns:
        along = equation.params.get("axes", equation.params.get("axis_name", ()))
        along = {along} if isinstance(along, str) else along
        names = {n for n in along or () if isinstance(n, str)}
        if names and equation.primitive.name != "axis_index":
            yield equation.primitive.name, names
        for inner in functions_in(equation):
            yield from _exchanges(getattr(inner, "jaxpr", inner))
