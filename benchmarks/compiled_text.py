"""What a compiled program sends, read from its text.

Arrays count as a whole: a result, or the operand of a reduce-scatter. Of a conditional,
the branch that sends the most counts; a loop of zero or one trips counts as one. What
custom calls send does not count. Other text raises: groups of one device, the replicas
of a `pmap`, and loops, unless XLA tells their trips or they count up to a constant.
"""

import re
from math import prod

SENDS = re.compile(
    r"(?:all-gather|all-reduce|(?:ragged-)?all-to-all|collective-\w+|reduce-scatter)"
    r"(?:-start)?"
)
BODY = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{\n((?: .*\n)*)\}", re.M)
LINE = re.compile(r"^ +(ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", re.M)
CALL = re.compile(r"\b(?:body|calls|condition|to_apply|\w+_computations?)=({.*?}|%\S+)")
OTHER = re.compile(r"replica_count=(?!1\b)|replica_groups=(\{\}|\{\{\d+\}|\[\d+,1\])")
START = re.compile(r'([\w.-]+)\), custom_call_target="AsyncCollectiveStart"')
CHANNEL = re.compile(r"channel_id=\d+")
NAME = re.compile(r"%([\w.-]+)")


def bytes_sent(text: str | None) -> int:
    """The bytes that a device sends in one run, at most."""
    bodies = {}
    for entry, name, block in BODY.findall(text := text or ""):
        bodies[entry or name] = {x[0] or x[1]: x[1:] for x in LINE.findall(block)}
    lines = [x for body in bodies.values() for x in body.values()]
    found = [x for x in lines if SENDS.fullmatch(x[2])]
    written = re.findall(rf" {SENDS.pattern}\(", text)
    if OTHER.search(text) or "ENTRY " not in bodies or len(found) != len(written):
        raise ValueError(f"What this program sends cannot be read: {text[:80]}.")
    # A TPU splits an operation over fusions with one channel. The first one counts.
    started = {*START.findall(text)}
    split = {y for x in found if x[0] in started for y in CHANNEL.findall(x[3])}

    def sent(caller: str) -> int:
        total, body = 0, bodies[caller]
        for name, result, opcode, rest in body.values():
            called = NAME.findall(" ".join(CALL.findall(rest)))
            if SENDS.fullmatch(opcode):
                if name in started or split.isdisjoint(CHANNEL.findall(rest)):
                    operands = " ".join(body[x][1] for x in _operands(rest))
                    total += _size(opcode, result, operands)
            elif opcode == "conditional":
                total += max(map(sent, called))
            elif not opcode.endswith(("-done", "-update")):  # the start called these
                trips = _trips(rest, body, bodies) if opcode == "while" else 1
                total += trips * sum(map(sent, called))
        return total

    return sent("ENTRY ")


def _size(opcode: str, result: str, operands: str) -> int:
    parts = [operands if opcode == "reduce-scatter" else result]
    # A start returns (operands, results, ...); that of an all-reduce may not.
    if opcode.endswith("-start") and (opcode[:5] != "all-r" or result[:2] == "(("):
        whole = re.sub(r"\{.*?\}", "", result)[1:-1]
        parts = re.findall(r"\([^()]*\)|\w+\[.*?\]", whole)[:2]
    arrays = [re.findall(r"\b[a-z]+(\d*)\w*\[(.*?)\]", x) for x in parts]
    return max(sum(map(_bytes, x)) for x in arrays)


def _bytes(array: tuple[str, str]) -> int:
    bits, shape = array  # of a bool, no bits; "<=4" is at most 4
    return -(-prod(map(int, re.findall(r"\d+", shape))) * int(bits or 8) // 8)


def _trips(loop: str, caller: dict, bodies: dict) -> int:
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop):
        return int(known[1])
    # A TPU's program does not tell. `body` must add to a counter, or clear a flag.
    condition, body = (bodies[x] for x in NAME.findall(" ".join(CALL.findall(loop))))
    test = condition["ROOT "][3]
    bound = _operands(test)[1:]
    counter = condition[_operands(test)[0]][3] if bound else test
    place = int(re.findall(r"index=(\d+)", counter)[0])
    after = _operands(body["ROOT "][3])[place]
    step, more = (_number(body, after, place, x) for x in (0, 1))
    if not bound and step == more == 0:
        return 1
    if "direction=LT" not in test or step < 1 or more != step + 1:
        raise ValueError(f"How often this loop runs cannot be read: {loop[:80]}.")
    first = _operands(caller[_operands(loop)[0]][3])[place]
    return len(range(_number(caller, first), _number(condition, bound[0]), step))


def _number(body: dict, name: str, place: int = -1, x: int = 0) -> int:
    """A number, where this element of the computation's argument is `x`."""
    _, _, opcode, rest = body[name]
    if opcode in ("add", "copy"):
        return sum(_number(body, y, place, x) for y in _operands(rest))
    if opcode == "get-tuple-element" and f" index={place}," in f"{rest},":
        return x
    return int(rest.split(")")[0].replace("false", "0"))


def _operands(rest: str) -> list[str]:
    return NAME.findall(rest.split(")")[0])
