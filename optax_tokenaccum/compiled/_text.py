"""Finds the collective operations in a program's text, and how often they run."""

import math
import re
from collections import defaultdict
from itertools import chain
from typing import NamedTuple

from optax_tokenaccum.compiled._loops import (
    NO_LOOP,
    Computation,
    Constants,
    Instruction,
    loop_of,
)
from optax_tokenaccum.compiled._replica_groups import Groups, connected_by

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
PATHS = ("always", "conditional")

COMPUTATION = re.compile(r"(?:(ENTRY) )?%?([\w.-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
CALLED = re.compile(
    r"\b(body|branch_computations|called_computations|calls|condition|"
    r"false_computation|to_apply|true_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
NAME = re.compile(r"[\w.-]+")
# A line with a collective operation, whether or not the rest of it can be read.
MENTIONED = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
STARTED = re.compile(r'%?([\w.-]+)\), custom_call_target="AsyncCollectiveStart"')
LAYOUT = re.compile(r"\{[^}]*\}")
ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([^\]]*)\]")
ELEMENT = re.compile(r"\([^()]*\)|\w+\[[^\]]*\]")  # of a tuple's type, less layouts
# A TPU's reduce-scatter is a fusion of an all-reduce and the slice that it keeps.
SCATTERING = "all-reduce-scatter"


class Collective(NamedTuple):
    """Collective operations of one kind, between the same devices, on the same path."""

    kind: str  # one of `KINDS`
    axes: tuple[str, ...] | None  # along which devices of a group differ; None: no mesh
    groups: Groups  # by position in the mesh; of a permute, (source, target) pairs
    path: str  # "always"; "conditional" in a branch, or a loop of zero or one trips
    times: int | None  # in one run: the loops' trip count; None if it is not known
    instructions: int  # in the program's text; XLA merges and splits them
    bytes: int  # of all instructions together, each of the `times` that they run


class Program:
    """The text of a compiled program, parsed into computations of instructions."""

    def __init__(self, text: str):
        lines = text.split("\n")
        counts = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", lines[0]))
        self._replicas = int(counts.get("replica_count", 1))
        self._partitions = int(counts.get("num_partitions", 1))
        self.num_devices = self._replicas * self._partitions
        body = Computation()
        self._computations: dict[str, Computation] = {}
        for line in lines:
            if match := COMPUTATION.match(line):
                body = self._computations[match[1] or match[2]] = Computation()
            elif match := INSTRUCTION.match(line):
                is_root, *fields = match.groups()
                body[match[2]] = Instruction(*fields)
                body.root = match[2] if is_root else body.root
            elif MENTIONED.search(line):
                raise _unreadable(repr(line[:200]))
        if "ENTRY" not in self._computations:
            raise _unreadable("0 entries in it")
        # A TPU splits an operation over fusions that start it, compute in parallel and
        # end it. Each of them holds the operation; only the one that starts it counts.
        self._starting = {*STARTED.findall(text)}
        self._split = {
            channel
            for body in self._computations.values()
            for line in body.values()
            if line.name in self._starting
            for channel in CHANNEL.findall(line.rest)
        }

    def operations(self) -> list[Collective]:
        """The collective operations of one run, at most, each alone and without axes.

        Only one branch of a conditional runs: `_most` chooses the operations.
        """
        return self._reached("ENTRY", 1, "always", {})

    def _reached(
        self, caller: str, times: int | None, path: str, constants: Constants
    ) -> list[Collective]:
        found: list[Collective] = []
        body = self._computations[caller]
        for name, result, opcode, rest in body.values():
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                groups = connected_by(kind, rest, self._replicas, self._partitions)
                is_whole = self._split.isdisjoint(CHANNEL.findall(rest))
                if groups and (is_whole or name in self._starting):
                    size = _bytes_of(opcode, result)
                    if kind == "reduce-scatter":
                        size *= len(groups[0])
                    elif caller.startswith(SCATTERING):
                        kind = "reduce-scatter"
                    found += [Collective(kind, None, groups, path, times, 1, size)]
            elif not opcode.endswith(("-done", "-update")):  # the start called these
                is_conditional, loop = opcode == "conditional", NO_LOOP
                if opcode == "while":
                    loop = loop_of(body[name], body, constants, self._computations)
                is_optional = is_conditional or loop.is_optional
                reached = [
                    self._reached(
                        callee,
                        _runs(times, role, loop.trips),
                        "conditional" if is_optional else path,
                        loop.constants,
                    )
                    for role, called in CALLED.findall(rest)
                    for callee in NAME.findall(called)
                ]
                found += _most(reached) if is_conditional else chain(*reached)
        return found


def _unreadable(got: str) -> ValueError:
    return ValueError(
        f"The text of a compiled program must be HLO that is known: got {got}. It is a "
        "newer XLA's: please report it."
    )


def _most(branches: list[list[Collective]]) -> list[Collective]:
    """The most that one of these branches sends.

    For each kind and groups, these are the operations of the branch that sends the most
    bytes. Operations in loops of unknown length cannot be compared with the others: of
    these, the branch with the most bytes each time counts.
    """
    most: dict[tuple[object, ...], list[Collective]] = {}
    for branch in branches:
        alike = defaultdict(list)
        for operation in branch:
            key = operation.kind, operation.groups, operation.times is None
            alike[key].append(operation)
        for key, operations in alike.items():
            most[key] = max(most.get(key, []), operations, key=_sent)
    return [*chain(*most.values())]


def _sent(operations: list[Collective]) -> int:
    return sum(x.bytes * (1 if x.times is None else x.times) for x in operations)


def _runs(times: int | None, role: str, trips: int | None) -> int | None:
    """How often a computation runs if its caller runs `times` times."""
    if role not in ("body", "condition"):
        return times
    if times is None or trips is None:
        return None
    return times * (trips + (role == "condition"))


def _bytes_of(opcode: str, result: str) -> int:
    result = LAYOUT.sub("", result)
    # The start of an operation returns (operands, results, ...), except the start of an
    # all-reduce, which returns only the result.
    is_start = opcode.endswith("-start")
    if is_start and (opcode != "all-reduce-start" or result.startswith("((")):
        result = ELEMENT.findall(result[1:-1])[1]
    num_bytes = 0
    for bits, shape in ARRAY.findall(result):
        sizes = map(int, re.findall(r"\d+", shape))  # "<=4" has at most 4 entries
        num_bytes += -(-math.prod(sizes) * int(bits or 8) // 8)  # "pred" has no digits
    return num_bytes
