"""Which devices a collective operation connects: spellings, meanings, mesh axes."""

import numpy as np
import pytest

from optax_tokenaccum._compiled.replica_groups import axes_of, connected_by

ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
STRIDED = ((0, 2, 4, 6), (1, 3, 5, 7))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
FAR = ((0, 4), (1, 5), (2, 6), (3, 7))
ENDS = ((0, 1, 4, 5), (2, 3, 6, 7))

# Spellings of groups and their meanings; mesh spellings come from XLA's own tests.
SPELLINGS = {
    "{{0,1},{2,3},{4,5},{6,7}}": PAIRS,
    "{{0,2,4,6},{1,3,5,7}}": STRIDED,
    "{}": ALL,
    "{{0},{1},{2,3}}": ((2, 3),),
    "[1,8]<=[8]": ALL,
    "[4,2]<=[8]": PAIRS,
    "[2,4]<=[4,2]T(1,0)": STRIDED,
    "[2,4]<=[2,2,2]T(1,0,2)": ENDS,
    "mesh['axis_0'=8] {'axis_0'}": ALL,
    "mesh['axis_0'=8,'axis_1'=1] {'axis_0'}": ALL,
    "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": STRIDED,
    "mesh['axis_0'=4,'axis_1'=2] {'axis_1'}": PAIRS,
    "mesh['axis_0'=4,'axis_1'=2] {'axis_1','axis_0'}": ALL,
    "mesh['x'=4,'y'=1,'z'=2], device_ids=([2,2,2]T(0,2,1)) {'x'}": ENDS,
    "mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}": FAR,
    "mesh['a'=8] {'a':(1)2}": FAR,
    "mesh['a'=8] {'a':(1)4}": STRIDED,
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=8] {'a':(2)4}": HALVES,
    "mesh['a'=8] {'a':(4)2}": PAIRS,
    "mesh['a'=8] {'a':(1)2,'a':(4)2}": ENDS,
    "mesh[a=2,b=4] {a}": FAR,
    "mesh['a'=8] {}": (),
}


@pytest.mark.parametrize(("spelled", "expected"), SPELLINGS.items(), ids=SPELLINGS)
def test_groups(spelled: str, expected: tuple[tuple[int, ...], ...]):
    attributes = f"%x), channel_id=1, replica_groups={spelled}, "
    found = connected_by("all-reduce", attributes + "use_global_device_ids=true", 1, 8)
    assert found == expected


# Numbers in groups are replicas, partitions or devices; 2 replicas of 4 partitions.
MEANINGS = {
    "replicas": ("all-reduce", "{{0,1}}", FAR),
    "all replicas": ("all-reduce", "{}", FAR),
    "replicas of a permutation": (
        "collective-permute",
        "{{1,0}}",
        ((4, 0), (5, 1), (6, 2), (7, 3)),
    ),
    "partitions": ("all-to-all, channel_id=1", "{{0,1},{2,3}}", PAIRS),
    "all partitions": ("all-to-all, channel_id=1", "{}", HALVES),
    "replicas and all partitions": ("all-reduce, channel_id=1", "{{0},{1}}", HALVES),
    "all replicas and partitions": ("all-gather, channel_id=1", "{}", ALL),
    "devices": (
        "all-reduce, channel_id=1, use_global_device_ids=true",
        "{{0,2,4,6},{1,3,5,7}}",
        STRIDED,
    ),
}


@pytest.mark.parametrize(
    ("attributes", "spelled", "expected"), MEANINGS.values(), ids=MEANINGS
)
def test_what_numbers_in_groups_mean(attributes: str, spelled: str, expected: object):
    kind = attributes.split(",")[0]
    key = "source_target_pairs" if "permute" in kind else "replica_groups"
    assert connected_by(kind, f"{attributes}, {key}={spelled}", 2, 4) == expected


AXES = {
    "data": STRIDED,
    "model": PAIRS,
    "data, model": ALL,
    "": (),
}


@pytest.mark.parametrize(("names", "groups"), AXES.items(), ids=AXES)
def test_axes(names: str, groups: tuple[tuple[int, ...], ...]):
    mesh = {"data": 4, "one": 1, "model": 2}
    assert ", ".join(axes_of(groups, mesh)) == names


def test_axes_of_pairs_and_of_parts_of_an_axis():
    assert axes_of(((6, 0), (2, 4)), {"data": 4, "model": 2}) == ("data",)
    assert axes_of(HALVES, {"data": 8}) == ("data",)
    ids = np.arange(8).reshape(2, 2, 2).swapaxes(0, 1).reshape(2, 4)
    assert axes_of(tuple(map(tuple, ids)), dict.fromkeys("abc", 2)) == ("a", "c")
