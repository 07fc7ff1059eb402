"""Finds the devices that a collective operation of a compiled program connects."""

import math
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]

# XLA's notations. `IOTA` is an array of 0, 1, ... that is reshaped, transposed and cut
# into rows. `MESH` defines a mesh and names axes of this mesh, or parts of axes.
LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))?"
    r" \{([^}]*)\}"
)
# `'a':(2)4` is the part of size 4 of axis `a`, after a part of size 2.
AXIS = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")

# With a channel, the groups of these operations number replicas, or devices; the groups
# of other operations number partitions.
OF_REPLICAS = {"all-gather", "all-reduce", "reduce-scatter"}


def connected_by(kind: str, attributes: str, replicas: int, partitions: int) -> Groups:
    """The groups of devices that exchange data, by position in the device list.

    For a collective-permute, the groups are its pairs of source and target. Groups of
    one device exchange nothing and are left out. `attributes` are the instruction's, as
    XLA writes them. There are `replicas` copies of the program, 1 under `jit`, with
    `partitions` devices each.
    """
    key, in_order = "replica_groups", sorted
    if kind == "collective-permute":
        key, in_order = "source_target_pairs", list
    _, found, spelled = attributes.partition(f"{key}=")
    # XLA's GetCollectiveOpGroupMode defines what the numbers mean. Here number n means
    # `devices[n]`, whose columns exchange data apart from each other.
    devices = np.arange(replicas * partitions).reshape(replicas, partitions, 1)
    if "channel_id=" in attributes:
        if "use_global_device_ids=true" in attributes:
            devices = devices.reshape(-1, 1, 1)
        elif kind in OF_REPLICAS:
            devices = devices.reshape(replicas, 1, partitions)
        else:
            devices = devices.swapaxes(0, 1)
    numbers = _parse(spelled) if found else []
    groups = [
        tuple(in_order(devices[group, column].ravel().tolist()))
        for group in numbers or [[*range(len(devices))]]
        for column in range(devices.shape[1])
    ]
    return tuple(sorted(group for group in groups if len({*group}) > 1))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which devices of a group differ, in mesh order.

    Positions in `groups` count the devices in mesh order.
    """
    places = np.indices(tuple(mesh.values())).reshape(len(mesh), -1)
    return tuple(
        name
        for name, place in zip(mesh, places, strict=True)
        if any(np.ptp(place[list(group)]) for group in groups)
    )


def _parse(spelled: str) -> list[list[int]]:
    if match := LISTED.match(spelled):
        return [_integers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])]
    if match := IOTA.match(spelled):
        return _iota(match[2], match[3]).reshape(_integers(match[1])).tolist()
    if match := MESH.match(spelled):
        axes, shape, order, listed, grouped = match.groups()
        sizes = {name: int(n) for name, n in re.findall(r"([^,=]+)=(\d+)", axes)}
        shape = shape or str(math.prod(sizes.values()))
        devices = np.array(_integers(listed)) if listed else _iota(shape, order)
        return _along(sizes, devices.ravel(), grouped)
    raise ValueError(
        "Groups of devices must be written in a way that is known, a list, an iota or "
        f"axes of a mesh: got {spelled[:80]!r}. It is a newer XLA's: please report it."
    )


def _along(sizes: dict[str, int], devices: np.ndarray, grouped: str) -> list[list[int]]:
    """The groups of devices that differ along the axes in `grouped`."""
    strides, stride = {}, devices.size
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    place = np.arange(devices.size)
    first = place.copy()  # the place of the first device of the group
    for name, before, part in AXIS.findall(grouped):
        size = int(part or sizes[name])
        stride = strides[name] * sizes[name] // (int(before or 1) * size)
        first -= place // stride % size * stride
    return [devices[first == i].tolist() for i in np.unique(first)]


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = _integers(shape)
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    return devices.transpose(_integers(order)) if order else devices


def _integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
