"""Finds the collective operations in a program's text, and how often they run."""

import re
from collections import defaultdict
from typing import Any, NamedTuple

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

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
CALLED = re.compile(
    r"\b(body|branch_computations|called_computations|calls|condition|"
    r"false_computation|to_apply|true_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
NAME = re.compile(r"[\w.-]+")
# A line with a collective operation, whether or not the rest of it can be read.
MENTIONED = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
STARTED = re.compile(r'%?([\w.-]+)\), custom_call_target="AsyncCollectiveStart"')
TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([^\]]*)\]")
# A TPU's reduce-scatter is a fusion of an all-reduce and the slice that it keeps.
SCATTERING = "all-reduce-scatter"
READABLE = "The text of a compiled program must be HLO that is known"
NEWER = "It is a newer XLA's: please report it."
BRANCHES = {"branch_computations", "false_computation", "true_computation"}


class Instruction(NamedTuple):
    """One line of the text."""

    name: str
    result: str  # its type, such as f32[16,8]{1,0}, or a tuple of such types
    opcode: str  # such as all-reduce
    rest: str  # the operands and attributes


class Operation(NamedTuple):
    """A collective operation at one place in the program, see `Collective`."""

    kind: str  # one of `KINDS`
    groups: Groups
    num_bytes: int  # of the array on one device
    times: int | None
    conditional: bool


class Program:
    """The text of a compiled program, parsed into computations of instructions."""

    def __init__(self, text: str):
        header = text.split("\n", 1)[0]
        self.replicas, self.partitions = (
            int(match[1]) if (match := re.search(rf"\b{name}=(\d+)", header)) else 1
            for name in ("replica_count", "num_partitions")
        )
        self._computations: dict[str, list[Instruction]] = {}
        body, entries = [], []
        for line in text.split("\n"):
            if match := COMPUTATION.match(line):
                body = self._computations[match[2]] = []
                entries += [match[2]] if match[1] else []
            elif match := INSTRUCTION.match(line):
                body.append(Instruction(*match.groups()))
            elif MENTIONED.search(line):
                raise ValueError(f"{READABLE}: got {line[:200]!r}. {NEWER}")
        if len(entries) != 1:
            raise ValueError(f"{READABLE}: got {len(entries)} entries in it. {NEWER}")
        self._entry = entries[0]
        # A TPU splits an operation over fusions that start it, compute in parallel and
        # end it. Each of them holds the operation; only the one that starts it counts.
        self._starting = {
            (computation, match[1])
            for computation, body in self._computations.items()
            for line in body
            if (match := STARTED.match(line.rest))
        }
        self._split_channels = {
            channel
            for computation, body in self._computations.items()
            for line in body
            if (computation, line.name) in self._starting
            for channel in CHANNEL.findall(line.rest)
        }

    def operations(self) -> list[Operation]:
        """Returns the collective operations of one run of the program, at most.

        Only one branch of a conditional runs: `_most` chooses the operations.
        """
        return self._reached(self._entry, 1, False)

    def _reached(
        self, computation: str, times: int | None, conditional: bool
    ) -> list[Operation]:
        found: list[Operation] = []
        for name, result, opcode, rest in self._computations[computation]:
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                channels = {*CHANNEL.findall(rest)}
                is_start = (computation, name) in self._starting
                if is_start or channels.isdisjoint(self._split_channels):
                    groups = connected_by(kind, rest, self.replicas, self.partitions)
                    num_bytes = _bytes_of(kind, opcode, result, groups)
                    if computation.startswith(SCATTERING):
                        kind = "reduce-scatter"
                    found.append(Operation(kind, groups, num_bytes, times, conditional))
            elif not opcode.endswith(("-done", "-update")):  # the start called these
                branches = []
                for role, called in CALLED.findall(rest):
                    runs, is_branch = _runs(times, role, rest), role in BRANCHES
                    for callee in NAME.findall(called):
                        of_callee = self._reached(
                            callee, runs, conditional or is_branch
                        )
                        if is_branch:
                            branches.append(of_callee)
                        else:
                            found += of_callee
                found += _most(branches)
        return found


def _most(branches: list[list[Operation]]) -> list[Operation]:
    """The most that one of these branches sends.

    For each kind and groups, these are the operations of the branch that sends the most
    bytes. Operations in loops of unknown length cannot be compared with the others: of
    these, the branch with the most bytes each time counts.
    """
    most: dict[Any, list[Operation]] = {}
    for branch in branches:
        alike = defaultdict(list)
        for operation in branch:
            key = operation.kind, operation.groups, operation.times is None
            alike[key].append(operation)
        for key, operations in alike.items():
            most[key] = max(most.get(key, []), operations, key=_sent)
    return [operation for operations in most.values() for operation in operations]


def _sent(operations: list[Operation]) -> int:
    return sum(x.num_bytes * (1 if x.times is None else x.times) for x in operations)


def _runs(times: int | None, role: str, rest: str) -> int | None:
    """How often a computation runs if its caller runs `times` times."""
    if role not in ("body", "condition"):
        return times
    trips = TRIPS.search(rest)
    if times is None or trips is None:
        return None
    return times * (int(trips[1]) + (role == "condition"))


def _bytes_of(kind: str, opcode: str, result: str, groups: Groups) -> int:
    # The start of an operation returns (operands, results, ...), except the start of an
    # all-reduce, which returns only the result.
    if opcode != kind and (kind != "all-reduce" or result.startswith("((")):
        result = _elements(result)[1]
    num_bytes = sum(_size(*match) for match in ARRAY.findall(result))
    shards = len(groups[0]) if kind == "reduce-scatter" and groups else 1
    return num_bytes * shards


def _size(dtype: str, shape: str) -> int:
    match = re.search(r"\d+", dtype)
    bits = int(match[0]) if match else 8  # "pred" has no digits
    for axis in shape.split(","):
        bits *= int(axis.lstrip("<= ") or 1)
    return -(-bits // 8)


def _elements(result: str) -> list[str]:
    """Splits a tuple's type; shapes and layouts also contain commas."""
    elements, depth = [""], 0
    for character in result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return elements
