"""Finds the devices that a collective operation of a compiled program connects."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
PART_OF_AXIS = re.compile(r"(.*):\((\d+)\)(\d+)")

# The groups of these operations number partitions if there is a channel; the groups of
# other operations number replicas, or devices.
OF_PARTITIONS = {
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
}


def connected_by(kind: str, attributes: str, replicas: int, partitions: int) -> Groups:
    """The groups of devices that exchange data, by position in the device list.

    For a collective-permute, the groups are its pairs of source and target. Groups of
    one device exchange nothing and are left out. `attributes` are the instruction's, as
    XLA writes them. There are `replicas` copies of the program, 1 under `jit`, with
    `partitions` devices each.
    """
    key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    _, found, spelled = attributes.partition(f"{key}=")
    groups = _parse(spelled) if found else []
    # XLA's GetCollectiveOpGroupMode defines what the numbers mean.
    devices = np.arange(replicas * partitions).reshape(replicas, partitions)
    if "channel_id=" not in attributes:
        groups = groups or [range(replicas)]
        found = [devices[list(g), p] for g in groups for p in range(partitions)]
    elif "use_global_device_ids=true" in attributes:
        found = [devices.ravel()[list(g)] for g in groups or [range(devices.size)]]
    elif kind in OF_PARTITIONS:
        groups = groups or [range(partitions)]
        found = [devices[r, list(g)] for g in groups for r in range(replicas)]
    else:
        found = [devices[list(g)].ravel() for g in groups or [range(replicas)]]
    tuples = [tuple(map(int, group)) for group in found]
    if kind != "collective-permute":
        tuples = [tuple(sorted(group)) for group in tuples]
    return tuple(sorted(group for group in tuples if len(set(group)) > 1))


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


def _parse(spelled: str) -> Sequence[Iterable[int]]:
    if match := LISTED.match(spelled):
        return [_integers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])]
    if match := IOTA.match(spelled):
        return _iota(match[2], match[3]).reshape(_integers(match[1])).tolist()
    if match := MESH.match(spelled):
        axes, reshaped, order, listed, grouped = match.groups()
        named = (axis.rsplit("=", 1) for axis in axes.split(","))
        sizes = {name: int(size) for name, size in named}
        if listed:
            devices = np.array(_integers(listed))
        else:
            devices = _iota(reshaped or str(np.prod([*sizes.values()])), order)
        return _along(sizes, devices.ravel(), grouped.split(",") if grouped else [])
    raise ValueError(
        "Groups of devices must be written in a way that is known, a list, an iota or "
        f"axes of a mesh: got {spelled[:80]!r}. It is a newer XLA's: please report it."
    )


def _along(
    sizes: dict[str, int], devices: np.ndarray, grouped: list[str]
) -> list[list[int]]:
    """The groups of devices that differ along the axes in `grouped`.

    `'a':(2)4` is the part of size 4 of axis `a`, after a part of size 2.
    """
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    rest, names = places.copy(), list(sizes)
    for axis in grouped:
        if match := PART_OF_AXIS.fullmatch(axis):
            name, before, size = match[1], int(match[2]), int(match[3])
        else:
            name, before, size = axis, 1, sizes[axis]
        after = sizes[name] // (before * size)
        place = places[names.index(name)]
        rest[names.index(name)] -= place // after % size * after
    groups = defaultdict(list)
    for device, key in zip(devices, rest.T, strict=True):
        groups[tuple(key)].append(int(device))
    return list(groups.values())


def _iota(shape: str, order: str | None) -> np.ndarray:
    dimensions = _integers(shape)
    devices = np.arange(np.prod(dimensions)).reshape(dimensions)
    return devices.transpose(_integers(order)) if order else devices


def _integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
