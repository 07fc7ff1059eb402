"""Reading the text of compiled programs, for every backend that was available.

The texts come from real programs, shortened; on 8 devices unless stated otherwise.
"""

import pytest

from optax_tokenaccum._compiled.text import Operation, Program

ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
STRIDED = ((0, 2, 4, 6), (1, 3, 5, 7))
RING = tuple((i, (i + 1) % 8) for i in range(8))

# jax 0.8.1 on CPU: a sum of gradients over 8 micro-batches.
LOOP = """\
HloModule jit_win, is_scheduled=true, num_partitions=8

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%x.1, %y.1)
}

%body (wide.param.3: (s32[], f32[16,32], f32[32,4], /*index=5*/f32[8,32])) -> (s32[]) {
  %all-reduce.6 = (f32[32,16]{1,0}, f32[4,32]{1,0}) all-reduce(%dot.10, %dot.11), \
channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, \
to_apply=%add.clone, metadata={op_name="jit(win)/while/body/dot_general"}
  ROOT %tuple.18 = (s32[], f32[16,32]{1,0}) tuple(%wrapped_add, %copy_add_fusion.1)
}

%condition (wide.param.2: (s32[], f32[16,32], f32[32,4])) -> pred[] {
  ROOT %wrapped_compare = pred[] fusion(%get-tuple-element.59, %constant.4), kind=kLoop
}

ENTRY %main.3_spmd (param.4: f32[16,32], param.2: f32[32,4]) -> (f32[16,32]) {
  %param.2 = f32[32,4]{1,0} parameter(1), sharding={replicated}
  %while.12 = (s32[], f32[16,32]{1,0}, /*index=5*/f32[8,32]{1,0}) while(%tuple.16), \
condition=%condition, body=%body, metadata={op_name="jit(win)/while"}, \
backend_config={"known_trip_count":{"n":"8"},"known_init_step":{"init":"0"}}
  ROOT %tuple.8 = (f32[16,32]{1,0}, f32[32,4]{1,0}) tuple(%get-tuple-element.31)
}
"""
GRADIENTS = Operation("all-reduce", ALL, 4 * (16 * 32 + 32 * 4), 8, False)

# jax 0.10.2 on CPU: a gather in one of two branches.
BRANCH = """\
HloModule jit__lambda, is_scheduled=true, num_partitions=8

FileLocations
1 {file_name_id=1 function_name_id=1 line=50 end_line=50 column=5 end_column=5}

%region_0.0_spmd (param: ()) -> (f32[8,1,16]) {
  %param = () parameter(0), metadata={op_name="jit(<lambda>)/shard_map"}
  ROOT %tuple.12 = (f32[8,1,16]{2,1,0}) tuple(%wrapped_broadcast)
}

%region_1.0_spmd (param.6: (f32[1,16])) -> (f32[8,1,16]) {
  %all_gather.5 = f32[8,1,16]{2,1,0} all-gather(%bitcast), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
  ROOT %tuple.13 = (f32[8,1,16]{2,1,0}) tuple(%all_gather.5)
}

ENTRY %main.0_spmd (param.4: f32[1,16], param.5: s32[]) -> f32[8,1,16] {
  %tuple.8 = () tuple(), metadata={op_name="jit(<lambda>)/shard_map/cond"}
  %conditional.1.clone = (f32[8,1,16]{2,1,0}) conditional(%fusion, %tuple.8, \
%tuple.11), branch_computations={%region_0.0_spmd, %region_1.0_spmd}
  ROOT %get-tuple-element.6 = f32[8,1,16]{2,1,0} get-tuple-element(%conditional.1)
}
"""

# libtpu 0.0.52 for a v5e of 2 x 4: one gather in three fusions, the second in a loop,
# and a permutation in two parts.
SPLIT = """\
HloModule jit_loss, is_scheduled=true, num_partitions=8

%fused_computation.32 (param_0.82: bf16[1,4,64]) -> (bf16[1,4,64], bf16[8,4,64]) {
  %param_0.82 = bf16[1,4,64]{2,1,0:T(4,128)(2,1)S(1)} parameter(0)
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
  ROOT %tuple.38 = (f32[2,4,4]{2,1,0:T(4,128)S(1)}) tuple(%convolution.19)
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

%condition (p: (f32[4,4])) -> pred[] {
  ROOT %lt.4 = pred[]{:T(512)} compare(%get-tuple-element.80, %constant.4), direction=LT
}

ENTRY %main_spmd (param.4: f32[4,4]) -> bf16[32,64] {
  %async-collective-start = (bf16[1,4,64]{2,1,0:T(4,128)(2,1)S(1)}) \
fusion(%fusion.16), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, \
calls=%fused_computation.32
  %while.3 = (f32[4,4]{1,0:T(4,128)S(1)}) while(%tuple.33), condition=%condition, \
body=%body
  %collective-permute-start.4 = (f32[4,4]{1,0:T(4,128)S(1)}, \
f32[4,4]{1,0:T(4,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%get-tuple-element.7), channel_id=12, \
source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  %collective-permute-done.4 = f32[4,4]{1,0:T(4,128)S(1)} \
collective-permute-done(%collective-permute-start.4)
  %async-collective-done = bf16[8,4,64]{2,1,0:T(4,128)(2,1)S(1)} fusion(%while.3), \
kind=kCustom, calls=%fused_computation.35
  ROOT %bitcast.43 = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} bitcast(%async-collective-done)
}
"""

# From the same libtpu: a reduce-scatter, made of an all-reduce and a slice.
SCATTER = """\
HloModule jit_program, is_scheduled=true, num_partitions=8

%all-reduce-scatter.clone.1 (input.4: f32[1024,1024]) -> f32[128,1024] {
  %input.4 = f32[1024,1024]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.12 = f32[1024,1024]{1,0:T(8,128)} all-reduce(%input.4), channel_id=6, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add.1.clone
  ROOT %dynamic-slice.46 = f32[128,1024]{1,0:T(8,128)S(1)} \
dynamic-slice(%all-reduce.12, %multiply.14, %constant.193), \
dynamic_slice_sizes={128,1024}
}

%add.1.clone (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.34 = f32[]{:T(128)} add(%x.3, %y.3)
}

ENTRY %main_spmd (param.4: f32[1024,1024]) -> f32[128,1024] {
  ROOT %fusion.53 = f32[128,1024]{1,0:T(8,128)S(1)} fusion(%param.4), kind=kCustom, \
calls=%all-reduce-scatter.clone.1
}
"""

STORED = {
    "in a loop": (LOOP, [GRADIENTS]),
    "in a loop of unknown length": (
        LOOP.replace("known_trip_count", "dynamic_variables"),
        [GRADIENTS._replace(times=None)],
    ),
    "in a loop's condition": (
        LOOP.replace("body=%body, ", "body=%add.clone, ").replace(
            "condition=%condition", "condition=%body"
        ),
        [GRADIENTS._replace(times=9)],
    ),
    "in a branch": (BRANCH, [Operation("all-gather", ALL, 512, 1, True)]),
    "in a branch, as two attributes": (
        BRANCH.replace(
            "branch_computations={%region_0.0_spmd, %region_1.0_spmd}",
            "true_computation=%region_1.0_spmd, false_computation=%region_0.0_spmd",
        ),
        [Operation("all-gather", ALL, 512, 1, True)],
    ),
    "a reduce-scatter in a fusion": (
        SCATTER,
        [Operation("reduce-scatter", ALL, 4 * 1024 * 1024, 1, False)],
    ),
    "split over fusions": (
        SPLIT,
        [
            Operation("all-gather", ALL, 2 * 8 * 4 * 64, 1, False),
            Operation("collective-permute", RING, 4 * 4 * 4, 1, False),
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), STORED.values(), ids=STORED)
def test_stored_program(text: str, expected: list[Operation]):
    assert Program(text).operations() == expected


# Conditionals. Computations: "small" gathers 64 bytes, "large" 256; "reduces" reduces
# 64 bytes; "loop" gathers 64 bytes in each of 3 trips, "unknown" in trips that the
# program does not count; "half" gathers 128 bytes in groups of four devices.
PARTS = """\
HloModule jit_f, num_partitions=8

%nothing (p: f32[2]) -> f32[64] {
  ROOT %zeros = f32[64]{0} broadcast(%c), dimensions={}
}

%small (p: f32[2]) -> f32[16] {
  ROOT %g = f32[16]{0} all-gather(%p), channel_id=1, EVERYWHERE
}

%large (p: f32[2]) -> f32[64] {
  ROOT %g = f32[64]{0} all-gather(%p), channel_id=2, EVERYWHERE
}

%half (p: f32[2]) -> f32[32] {
  ROOT %g = f32[32]{0} all-gather(%p), channel_id=3, HALVES
}

%reduces (p: f32[2]) -> f32[16] {
  ROOT %r = f32[16]{0} all-reduce(%p), channel_id=4, EVERYWHERE
}

%twice (p: f32[2]) -> f32[16] {
  %first = f32[16]{0} call(%p), to_apply=%small
  ROOT %second = f32[16]{0} call(%first), to_apply=%small
}

%loop (p: f32[2]) -> f32[2] {
  ROOT %while.1 = f32[2]{0} while(%p), condition=%nothing, body=%small, \
backend_config={"known_trip_count":{"n":"3"}}
}

%unknown (p: f32[2]) -> f32[2] {
  ROOT %while.2 = f32[2]{0} while(%p), condition=%nothing, body=%small
}

%unknown.large (p: f32[2]) -> f32[2] {
  ROOT %while.3 = f32[2]{0} while(%p), condition=%nothing, body=%large
}

%gathers.and.reduces (p: f32[2]) -> f32[2] {
  %first = f32[16]{0} call(%p), to_apply=%small
  ROOT %second = f32[16]{0} call(%first), to_apply=%reduces
}

%nested (p: f32[2]) -> f32[16] {
  %before = f32[16]{0} call(%p), to_apply=%small
  ROOT %c = f32[16]{0} conditional(%i, %p, %p), branch_computations={%small, %twice}
}
""".replace(
    "EVERYWHERE", "replica_groups=[1,8]<=[8], use_global_device_ids=true"
).replace("HALVES", "replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true")
SMALL = Operation("all-gather", ALL, 64, 1, True)
LARGE = SMALL._replace(num_bytes=256)
HALF = Operation("all-gather", STRIDED, 128, 1, True)
REDUCES = Operation("all-reduce", ALL, 64, 1, True)
IN_LOOP = SMALL._replace(times=3)
UNKNOWN, UNKNOWN_LARGE = SMALL._replace(times=None), LARGE._replace(times=None)
CONDITIONALS = {
    "one of which sends nothing": ("nothing small nothing", [SMALL]),
    "with the same operations": ("small small", [SMALL]),
    "the first sends more": ("large small", [LARGE]),
    "the last sends more": ("small small large", [LARGE]),
    "that call computations": ("small twice", [SMALL, SMALL]),
    "many small ones, and between other devices": (
        "twice half twice",
        [SMALL, SMALL, HALF],
    ),
    "trips of a loop": ("twice loop", [IN_LOOP]),
    "one large, not the trips of a loop": ("large loop", [LARGE]),
    "of different kinds": ("small reduces", [SMALL, REDUCES]),
    "each kind by itself": ("gathers.and.reduces large", [LARGE, REDUCES]),
    "between other devices": ("small half", [SMALL, HALF]),
    "nested": ("large nested", [LARGE]),
    "nested, and the most": ("twice nested small", [SMALL] * 3),
    "unknown trips, and known": ("large unknown", [LARGE, UNKNOWN]),
    "unknown trips in both": ("unknown unknown.large", [UNKNOWN_LARGE]),
}


def of_branches(names: str) -> str:
    """A program with one conditional over computations in `PARTS`."""
    computations = ", ".join(f"%{name}" for name in names.split())
    return f"""{PARTS}
ENTRY %main (p: f32[2], i: s32[]) -> f32[2] {{
  ROOT %c = f32[2] conditional(%i, %p), branch_computations={{{computations}}}
}}
"""


@pytest.mark.parametrize(("names", "expected"), CONDITIONALS.values(), ids=CONDITIONALS)
def test_one_branch_of_a_conditional_counts(names: str, expected: list[Operation]):
    assert Program(of_branches(names)).operations() == expected


def test_two_conditionals_add_up():
    text = of_branches("small large").replace(
        "  ROOT %c =",
        "  %b = f32[2] conditional(%i, %p), "
        "true_computation=%small, false_computation=%loop\n  ROOT %c =",
    )
    assert Program(text).operations() == [IN_LOOP, LARGE]


def test_conditional_in_a_loop():
    text = (
        of_branches("small loop").replace("ENTRY %main", "%body")
        + """
ENTRY %main (p: f32[2]) -> f32[2] {
  ROOT %w = f32[2]{0} while(%p), condition=%nothing, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    )
    assert Program(text).operations() == [SMALL._replace(times=15)]


def one_line(line: str, header: str = "num_partitions=8") -> list[Operation]:
    """Parse the operations of a program whose entry contains `line`."""
    program = f"HloModule jit_f, {header}\n\nENTRY %main () -> f32[] {{\n  {line}\n}}\n"
    return Program(program).operations()


GLOBAL = (
    "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true"
)
# An operation's start returns operands, results and more, as in XLA's parser.
ASYNCHRONOUS = {
    "all-reduce": "f32[6,4]{1,0} all-reduce",
    "all-reduce of several": "(f32[4,4]{1,0}, f32[8]{0}) all-reduce",
    "all-gather": "(f32[2,3]{1,0}, f32[8,3]{1,0}) all-gather",
    "all-gather of several": "((f32[4], f32[2]), (f32[16], f32[8])) all-gather",
    "reduce-scatter": "((f32[24]{0}), f32[6]{0}, u32[]) reduce-scatter",
    "all-to-all": "((f32[3,8]{1,0}), f32[3,8]{1,0}) all-to-all",
    "ragged-all-to-all": "((s32[3], f32[2]), f32[24]) ragged-all-to-all",
}


@pytest.mark.parametrize("started", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_asynchronous_pair_counts_once(started: str):
    kind = started.split(" ")[-1]
    lines = (
        f"%start = {started}-start(%x), {GLOBAL}\n"
        f"  ROOT %done = f32[24]{{0}} {kind}-done(%start), metadata={{}}"
    )
    if kind == "ragged-all-to-all":
        lines = lines.replace(", use_global_device_ids=true", "")
    assert one_line(lines) == [Operation(kind, STRIDED, 96, 1, False)]


def test_asynchronous_pair_that_calls_a_computation_counts_once():
    text = f"""\
HloModule jit_f, num_partitions=8

%async_computation.29 (p: f32[24]) -> f32[24] {{
  ROOT %all-to-all.1 = f32[24]{{0}} all-to-all(%p), {GLOBAL}
}}, execution_thread="main"

ENTRY %main (p: f32[24]) -> f32[24] {{
  %start = ((f32[24]{{0}}), f32[24]{{0}}) async-start(%p), calls=%async_computation.29
  %update = ((f32[24]{{0}}), f32[24]{{0}}) async-update(%start), \
calls=%async_computation.29
  ROOT %done = f32[24]{{0}} async-done(%update), calls=%async_computation.29
}}
"""
    [operation] = Program(text).operations()
    assert operation == Operation("all-to-all", STRIDED, 96, 1, False)


SIZES = {
    "f32[]": 4,
    "pred[3]": 3,
    "bf16[2,3]{1,0:T(8,128)(2,1)S(1)}": 12,
    "f8e4m3fn[5]{0}": 5,
    "s4[3]{0:E(4)}": 2,
    "c128[2]{0}": 32,
    "u32[<=4]{0}": 16,
    "f32[0,3]{1,0}": 0,
    "(f32[2]{0}, s8[3]{0}, /*index=5*/token[])": 11,
}


@pytest.mark.parametrize(("result", "num_bytes"), SIZES.items(), ids=SIZES)
def test_bytes_of_a_type(result: str, num_bytes: int):
    [operation] = one_line(f"ROOT %all-reduce = {result} all-reduce(%x), {GLOBAL}")
    assert operation.num_bytes == num_bytes


def test_result_of_a_reduce_scatter_is_a_shard():
    [operation] = one_line(f"%r = f32[6]{{0}} reduce-scatter(%x), {GLOBAL}")
    assert operation.num_bytes == 4 * 24


def test_a_program_of_replicas():
    line = "ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add"
    [operation] = one_line(line, "replica_count=4")
    assert operation.groups == ((0, 1, 2, 3),)


UNREADABLE = {
    "a type with spaces": "%r = f32 [4] all-reduce(%x), replica_groups={}",
    "an instruction without a name": "f32[4]{0} all-gather-start(%x), channel_id=1",
    "groups of another kind": f"%r = f32[4] all-reduce(%x), {GLOBAL}".replace(
        "{{", "<"
    ),
}


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_not_passed_over(line: str):
    with pytest.raises(ValueError, match="that is known.*please report it"):
        one_line(line)


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="must be HLO that is known: got 0 entries"):
        Program("module @jit_f {\n}\n")
