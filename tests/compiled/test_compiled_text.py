"""Reading the text of compiled programs, for every backend that was available.

The texts come from real programs, shortened, or are written here; on 8 devices unless
stated otherwise.
"""

import pytest

from optax_tokenaccum.compiled._replica_groups import Groups, connected_by
from optax_tokenaccum.compiled._text import Collective, Program


def one(kind: str, groups: Groups, num_bytes: int, path: str = "always") -> Collective:
    """One operation that runs once."""
    return Collective(kind, None, groups, path, 1, 1, num_bytes)


ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
STRIDED = ((0, 2, 4, 6), (1, 3, 5, 7))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
FAR = ((0, 4), (1, 5), (2, 6), (3, 7))
ENDS = ((0, 1, 4, 5), (2, 3, 6, 7))

# libtpu 0.0.52 for a v5e of 2 x 4: one gather in three fusions, the second in a loop.
SPLIT = """\
HloModule jit_loss, is_scheduled=true, num_partitions=8

%fused_computation.32 (param_0.82: bf16[1,4,64]) -> (bf16[1,4,64], bf16[8,4,64]) {
  %all-gather.8 = bf16[8,4,64]{2,1,0:T(4,128)(2,1)} all-gather(%param_0.82), \
channel_id=6, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
use_global_device_ids=true
  ROOT %custom-call.7 = (bf16[1,4,64]{2,1,0:T(4,128)(2,1)S(1)}, u32[]{:S(2)}) \
custom-call(%all-gather.8), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.42 (param_0.86: bf16[1,4,64]) -> (f32[2,4,4], bf16[1,4,64]) {
  %all-gather.10 = bf16[8,4,64]{2,1,0:T(4,128)(2,1)S(1)} all-gather(%param_0.86), \
channel_id=6, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
use_global_device_ids=true
}

%fused_computation.35 (param_0.93: bf16[1,4,64]) -> bf16[8,4,64] {
  %all-gather.14 = bf16[8,4,64]{2,1,0:T(4,128)(2,1)} all-gather(%param_0.93), \
channel_id=6, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
use_global_device_ids=true
  ROOT %custom-call.9 = bf16[8,4,64]{2,1,0:T(4,128)(2,1)S(1)} \
custom-call(%param_0.93, %all-gather.14), custom_call_target="AsyncCollectiveDone"
}

%body (p: (f32[4,4])) -> (f32[4,4]) {
  ROOT %fusion.42 = (f32[2,4,4]{2,1,0:T(4,128)S(1)}) fusion(%p), kind=kOutput, \
calls=%async_collective_fusion.42
}

%condition (p.1: (f32[4,4])) -> pred[] {
  ROOT %less = pred[]{:T(512)} compare(%counter, %bound), direction=LT
}

ENTRY %main_spmd (param.4: f32[4,4]) -> bf16[32,64] {
  %async-collective-start = (bf16[1,4,64]{2,1,0:T(4,128)(2,1)S(1)}) \
fusion(%fusion.16), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, \
calls=%fused_computation.32
  %while.3 = (f32[4,4]{1,0:T(4,128)S(1)}) while(%tuple.33), condition=%condition, \
body=%body
  %async-collective-done = bf16[8,4,64]{2,1,0:T(4,128)(2,1)S(1)} fusion(%while.3), \
kind=kCustom, calls=%fused_computation.35
}
"""

# From the same libtpu: a reduce-scatter, made of an all-reduce and a slice.
SCATTER = """\
HloModule jit_program, is_scheduled=true, num_partitions=8

%all-reduce-scatter.clone.1 (input.4: f32[1024,1024]) -> f32[128,1024] {
  %all-reduce.12 = f32[1024,1024]{1,0:T(8,128)} all-reduce(%input.4), channel_id=6, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add.1.clone
  ROOT %dynamic-slice.46 = f32[128,1024]{1,0:T(8,128)S(1)} \
dynamic-slice(%all-reduce.12, %multiply.14, %constant.193), \
dynamic_slice_sizes={128,1024}
}

ENTRY %main_spmd (param.4: f32[1024,1024]) -> f32[128,1024] {
  ROOT %fusion.53 = f32[128,1024]{1,0:T(8,128)S(1)} fusion(%param.4), kind=kCustom, \
calls=%all-reduce-scatter.clone.1
}
"""


def test_an_operation_that_a_tpu_splits_over_fusions_counts_once():
    expected = one("all-gather", ALL, 2 * 8 * 4 * 64)
    assert Program(SPLIT).operations() == [expected]


def test_a_reduce_scatter_of_a_tpu_is_a_fusion():
    expected = one("reduce-scatter", ALL, 4 * 1024 * 1024)
    assert Program(SCATTER).operations() == [expected]


# Conditionals over these computations: "small" gathers 64 bytes, "large" 256, "half"
# 128 in groups of four devices; "unknown" loops in trips that nobody counts.
EVERYWHERE = "replica_groups=[1,8]<=[8], use_global_device_ids=true"
TRIPS = 'backend_config={"known_trip_count":{"n":"3"}}'
COMPUTATIONS = {
    "nothing": ["f32[64]{0} broadcast(%c), dimensions={}"],
    "small": [f"f32[16]{{0}} all-gather(%p), channel_id=1, {EVERYWHERE}"],
    "large": [f"f32[64]{{0}} all-gather(%p), channel_id=2, {EVERYWHERE}"],
    "half": [
        "f32[32]{0} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), "
        "use_global_device_ids=true"
    ],
    "twice": ["f32[16]{0} call(%p), to_apply=%small"] * 2,
    "loop": [f"f32[2]{{0}} while(%p), condition=%nothing, body=%small, {TRIPS}"],
    "tests": [f"f32[2]{{0}} while(%p), condition=%small, body=%nothing, {TRIPS}"],
    "asynchronous": [
        f"((f32[2]), f32[16]) async-{part}(%x.0), calls=%small"
        for part in ("start", "update", "done")
    ],
    "unknown": ["f32[2]{0} while(%p), condition=%nothing, body=%small"],
}
SMALL = one("all-gather", ALL, 64, "conditional")
LARGE = SMALL._replace(bytes=256)
HALF = one("all-gather", STRIDED, 128, "conditional")
# The branches of a conditional, and the operations that count.
CONDITIONALS = {
    "small large nothing": [LARGE],
    "twice small": [SMALL, SMALL],
    "twice loop": [SMALL._replace(times=3)],
    "asynchronous nothing": [SMALL],
    "tests nothing": [SMALL._replace(times=4)],
    "small half": [SMALL, HALF],
    "large unknown": [LARGE, SMALL._replace(times=None)],
}


def of_branches(names: str) -> str:
    """A program with one conditional over `COMPUTATIONS`."""
    text = "HloModule jit_f, num_partitions=8\n"
    for name, results in COMPUTATIONS.items():
        lines = [f"  %x.{i} = {result}\n" for i, result in enumerate(results)]
        text += f"\n%{name} (p: f32[2]) -> f32[2] {{\n{''.join(lines)}}}\n"
    called = [f"%{name}" for name in names.split()]
    branches = f"branch_computations={{{', '.join(called)}}}"
    if len(called) == 2:
        branches = "true_computation={}, false_computation={}".format(*called)
    return f"""{text}
ENTRY %main (p: f32[2], i: s32[]) -> f32[2] {{
  ROOT %c = f32[2] conditional(%i, %p), {branches}
}}
"""


@pytest.mark.parametrize(("names", "expected"), CONDITIONALS.items(), ids=CONDITIONALS)
def test_one_branch_of_a_conditional_counts(names: str, expected: list[Collective]):
    assert Program(of_branches(names)).operations() == expected


# A gather in a loop, as a TPU's programs have it.
COUNTED = """\
HloModule jit_f, num_partitions=8

%body (p: (f32[2], u32[], s32[])) -> (f32[2], u32[], s32[]) {
  %p = (f32[2]{0:T(128)}, u32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %x = f32[2]{0:T(128)} get-tuple-element(%p), index=0
  %step = u32[]{:T(128)} constant(STEP)
  %kept = s32[]{:T(128)} get-tuple-element(%p), index=2
  %copy.1 = s32[]{:T(128)S(6)} copy(%kept)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %next = u32[]{:T(128)S(6)} NEXT
  ROOT %tuple.1 = (f32[2]{0:T(128)}, u32[]{:T(128)}, s32[]{:T(128)}) \
tuple(%x, %next, /*index=2*/%copy.1)
  %gathered = f32[16]{0} all-gather(%x), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true
}

%condition (p.1: (f32[2], u32[], s32[])) -> pred[] {
  %p.1 = (f32[2]{0:T(128)}, u32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=1
  %kept.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=2
  %four = u32[]{:T(128)} constant(4)
  ROOT %compare = pred[]{:T(512)} compare(COMPARED), direction=ORDER, metadata={}
}

ENTRY %main (x.1: f32[2], n: u32[]) -> f32[2] {
  %x.1 = f32[2]{0:T(128)} parameter(0)
  %n = u32[]{:T(128)} parameter(1)
  %first = u32[]{:T(128)} constant(FIRST)
  %copy.2 = u32[]{:T(128)} copy(%first)
  %ten = s32[]{:T(128)} constant(10)
  %tuple = (f32[2]{0:T(128)}, u32[]{:T(128)}, s32[]{:T(128)}) \
tuple(%x.1, BEFORE, %ten)
  %while = (f32[2]{0:T(128)}, u32[]{:T(128)}, s32[]{:T(128)}) while(%tuple), \
condition=%condition, body=%body
  ROOT %result = f32[2]{0:T(128)} get-tuple-element(%while), index=0
}
"""
AS_USUAL = {
    "FIRST": "0",
    "BEFORE": "%copy.2",
    "STEP": "1",
    "NEXT": "add(%i, %step)",
    "COMPARED": "%i.1, %four",
    "ORDER": "LT",
}
TRIPS_OF: list[tuple[dict[str, str], int | None]] = [
    ({}, 4),
    ({"FIRST": "1"}, 3),
    ({"FIRST": "5"}, 0),
    ({"STEP": "3"}, 2),
    ({"NEXT": "add(%step, %i)"}, 4),
    ({"ORDER": "LE"}, 5),
    ({"FIRST": "9", "STEP": "-2", "ORDER": "GT"}, 3),
    ({"FIRST": "9", "STEP": "-1", "ORDER": "GE"}, 6),
    ({"COMPARED": "%i.1, %kept.1"}, 10),  # what every trip keeps is constant
    ({"NEXT": "add(%i, %copy.1)"}, 1),
    ({"BEFORE": "%n"}, None),
    ({"NEXT": "multiply(%i, %step)"}, None),
    ({"NEXT": "add(%i, %i)"}, None),
    ({"NEXT": "copy(%step)"}, None),
    ({"COMPARED": "%four, %i.1"}, None),
    ({"COMPARED": "%i.1, %unknown"}, None),
    ({"ORDER": "NE"}, None),
    ({"STEP": "-1"}, None),  # until it overflows
    ({"STEP": "0"}, None),
    ({"FIRST": "2", "STEP": "4294967295", "ORDER": "LT"}, None),
]


@pytest.mark.parametrize(("changed", "trips"), TRIPS_OF, ids=str)
def test_trips_are_read_where_numbers_are_constant(
    changed: dict[str, str], trips: int | None
):
    text = COUNTED
    for name, written in {**AS_USUAL, **changed}.items():
        text = text.replace(name, written)
    assert Program(text).operations() == [
        one("all-gather", ALL, 64)._replace(times=trips)
    ]


def one_line(line: str, header: str = "num_partitions=8") -> list[Collective]:
    """Parse the operations of a program whose entry contains `line`."""
    program = f"HloModule jit_f, {header}\n\nENTRY %main () -> f32[] {{\n  {line}\n}}\n"
    return Program(program).operations()


GLOBAL = (
    "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true"
)
# An operation's start returns operands, results and more, as in XLA's parser; the
# result of a reduce-scatter is a shard.
RESULTS = {
    "bf16[2,3]{1,0:T(8,128)(2,1)S(1)} all-reduce": 12,
    "s4[3]{0:E(4)} all-reduce": 2,
    "u32[<=4]{0} all-reduce": 16,
    "(f32[2]{0}, pred[3]{0}, /*index=5*/token[]) all-reduce": 11,
    "f32[6]{0} reduce-scatter": 96,
    "(f32[4,4]{1,0}, f32[8]{0}) all-reduce-start": 96,
    "((f32[4], f32[2]), (f32[16], f32[8])) all-gather-start": 96,
    "((f32[24]{0}), f32[6]{0}, u32[]) reduce-scatter-start": 96,
}


@pytest.mark.parametrize(("result", "num_bytes"), RESULTS.items(), ids=RESULTS)
def test_an_operation_counts_once_with_its_bytes(result: str, num_bytes: int):
    kind = result.split(" ")[-1].removesuffix("-start")
    lines = (
        f"%start = {result}(%x), {GLOBAL}\n"
        f"  ROOT %done = f32[24]{{0}} {kind}-done(%start), metadata={{}}"
    )
    assert one_line(lines) == [one(kind, STRIDED, num_bytes)]


def test_a_program_of_replicas():
    line = "ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add"
    [operation] = one_line(line, "replica_count=4")
    assert operation.groups == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32 [4] all-reduce(%x), replica_groups={}",
        "%r = f32[4] all-reduce(%x), channel_id=1, replica_groups=<0,1>",
    ],
)
def test_what_cannot_be_read_is_not_passed_over(line: str):
    with pytest.raises(ValueError, match="that is known.*please report it"):
        one_line(line)
    with pytest.raises(ValueError, match="that is known: got 0 entries"):
        Program("module @jit_f {\n}\n")


# Spellings and their groups; mesh spellings come from XLA's own tests.
SPELLINGS = {
    "{}": ALL,
    "{{0},{1},{2,3}}": ((2, 3),),
    "[2,4]<=[2,2,2]T(1,0,2)": ENDS,
    "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": STRIDED,
    "mesh['x'=4,'y'=1,'z'=2], device_ids=([2,2,2]T(0,2,1)) {'x'}": ENDS,
    "mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}": FAR,
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh[a=2,b=4] {a}": FAR,
    "mesh['a'=8] {}": (),
}


@pytest.mark.parametrize(("spelled", "expected"), SPELLINGS.items(), ids=SPELLINGS)
def test_groups(spelled: str, expected: tuple[tuple[int, ...], ...]):
    attributes = f"%x), channel_id=1, replica_groups={spelled}, "
    found = connected_by("all-reduce", attributes + "use_global_device_ids=true", 1, 8)
    assert found == expected


# Numbers in groups are replicas, partitions or devices; 2 replicas of 4 partitions.
DEVICES = "all-reduce, channel_id=1, use_global_device_ids=true"
MEANINGS = [
    ("all-reduce", "{{0,1}}", FAR),
    ("collective-permute", "{{1,0}}", ((4, 0), (5, 1), (6, 2), (7, 3))),
    ("all-to-all, channel_id=1", "{{0,1},{2,3}}", PAIRS),
    ("all-reduce, channel_id=1", "{{0},{1}}", HALVES),
    ("all-gather, channel_id=1", "{}", ALL),
    (DEVICES, "{{0,2,4,6},{1,3,5,7}}", STRIDED),
]


@pytest.mark.parametrize(("attributes", "spelled", "expected"), MEANINGS)
def test_what_numbers_in_groups_mean(attributes: str, spelled: str, expected: object):
    kind = attributes.split(",")[0]
    key = "source_target_pairs" if "permute" in kind else "replica_groups"
    assert connected_by(kind, f"{attributes}, {key}={spelled}", 2, 4) == expected
