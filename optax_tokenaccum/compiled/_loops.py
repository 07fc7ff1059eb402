"""Reads from the text of a program how often a loop runs."""

import re
from collections.abc import Mapping
from typing import NamedTuple

CALLED = re.compile(r"\b(body|condition)=%?([\w.-]+)")
DIRECTION = re.compile(r"\bdirection=(LT|LE|GT|GE)\b")
INDEX = re.compile(r"\bindex=(\d+)")
LITERAL = re.compile(r"(-?\d+|false|true)\)")
OPERAND = re.compile(r"%([\w.-]+)")
SCALAR = re.compile(r"(pred|[su]\d+)\[\]")
TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
OVERFLOWS = 2**31  # a counter may have 32 bits, with a sign or without

Constants = Mapping[int, int]  # elements of a computation's parameter, and their values


class Instruction(NamedTuple):
    """One line of the text."""

    name: str
    result: str  # its type, such as f32[16,8]{1,0}, or a tuple of such types
    opcode: str  # such as all-reduce
    rest: str  # the operands and attributes

    def operands(self) -> list[str]:
        return OPERAND.findall(self.rest.split(")")[0])


class Scalar(NamedTuple):
    """A number, added to an element of the computation's parameter if there is one."""

    element: int | None
    number: int


class Computation(dict[str, Instruction]):
    """Instructions by name."""

    root = ""  # the name of the result

    def elements(self, name: str, constants: Constants) -> list[Scalar | None]:
        """What a tuple holds; `None` for what cannot be read."""
        if name not in self or self[name].opcode != "tuple":
            return []
        return [self.scalar(x, constants) for x in self[name].operands()]

    def scalar(self, name: str, constants: Constants) -> Scalar | None:
        if name not in self or not SCALAR.match(self[name].result):
            return None
        rest, operands = self[name].rest, self[name].operands()
        match self[name].opcode:
            case "constant" if literal := LITERAL.match(rest):
                value = {"false": 0, "true": 1}.get(literal[1], literal[1])
                return Scalar(None, int(value))
            case "get-tuple-element" if self._is_parameter(*operands):
                i = int(INDEX.findall(rest)[0])
                return Scalar(None, constants[i]) if i in constants else Scalar(i, 0)
            case "add" | "copy":
                terms = [x for x in (self.scalar(x, constants) for x in operands) if x]
                elements = [x.element for x in terms if x.element is not None]
                if len(terms) == len(operands) and len(elements) <= 1:
                    number = sum(x.number for x in terms)
                    return Scalar(elements[0] if elements else None, number)
        return None

    def _is_parameter(self, name: str) -> bool:
        return name in self and self[name].opcode == "parameter"


class Loop(NamedTuple):
    """What is known of a loop."""

    trips: int | None  # at most; `None` if it is not known
    is_optional: bool  # it runs at most once: its body clears the flag that it tests
    constants: Constants  # of its body


NO_LOOP = Loop(1, False, {})


def loop_of(
    loop: Instruction,
    caller: Computation,
    constants: Constants,
    computations: Mapping[str, Computation],
) -> Loop:
    """Reads a `while`; `constants` are those of `caller`.

    A CPU's or GPU's program says how often a loop runs. A TPU's does not: there its
    condition must compare a counter with a constant, and the counter must begin with a
    constant, to which the body adds a constant.
    """
    called = dict(CALLED.findall(loop.rest))
    body, condition = computations[called["body"]], computations[called["condition"]]
    before = [x for name in loop.operands() for x in caller.elements(name, constants)]
    after = body.elements(body.root, {})
    kept = {
        i: x.number
        for i, (x, y) in enumerate(zip(before, after, strict=False))
        if x and x.element is None and y == Scalar(i, 0)
    }
    if noted := TRIPS.search(loop.rest):
        return Loop(int(noted[1]), False, kept)
    match condition.scalar(condition.root, {}):
        case Scalar(int(flag), 0) if after[flag : flag + 1] == [Scalar(None, 0)]:
            return Loop(1, True, kept)
    after = body.elements(body.root, kept)
    values = dict(enumerate(zip(before, after, strict=False)))
    return Loop(_trips(condition, kept, values), False, kept)


def _trips(
    condition: Computation,
    constants: Constants,
    values: Mapping[int, tuple[Scalar | None, Scalar | None]],
) -> int | None:
    """How far a counter counts; `values` are those before and after the first trip."""
    test = condition.get(condition.root)
    order = DIRECTION.search(test.rest) if test else None
    if not test or test.opcode != "compare" or not order:
        return None
    match [condition.scalar(x, constants) for x in test.operands()]:
        case [Scalar(int(i), 0), Scalar(None, bound)]:
            pass
        case _:
            return None
    match values.get(i):
        case Scalar(None, first), Scalar(j, step) if i == j:
            pass
        case _:
            return None
    sign = 1 if order[1] in ("LT", "LE") else -1
    if step * sign <= 0:
        return None
    trips = len(range(first, bound + sign * (order[1] in ("LE", "GE")), step))
    return trips if abs(first + trips * step) < OVERFLOWS else None
