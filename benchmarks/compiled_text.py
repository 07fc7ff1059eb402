"""What a compiled program sends and which outputs share a buffer, from its text.

Arrays count as a whole, and of a conditional, the branch that sends the most. Loops
count from 0, as scans do, or test a flag and then run once at most. Custom calls do not
count. Other text raises an error.
"""

import re
from math import prod

BODY = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{\n((?: .*\n)*)\}", re.M)
LINE = re.compile(r"^ +(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", re.M)
CALL = re.compile(r"\b(?:body|calls|condition|to_apply|\w+_computations?)=({.*?}|%\S+)")
SEND = r"(?:(?:ragged-)?all-(?:\w+|to-all)|collective-\w+|reduce-scatter)(?:-start)?"
OTHER = re.compile(r"replica_count=(?!1\b)|replica_groups=(\{\}|\{\{\d+\}|\[\d+,1\])")
START = re.compile(r'([\w.-]+)\), custom_call_target="AsyncCollectiveStart"')
ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[(.*?)\]")
NAME = re.compile(r"%([\w.-]+)")
DONATED = re.compile(r"\{(\d+)\}: \((\d+), ")


def in_several_buffers(text: str) -> list[list[int]]:
    """Finds values that a program returns several times, in donated arguments.

    Returns:
      the numbers of these arguments, for each value.
    """
    header, _, rest = text.partition("\n")
    donated = {int(x): int(y) for x, y in DONATED.findall(header)}
    found: dict[str, list[int]] = {}
    for outputs in re.findall(r"^ENTRY (?s:.*?)^ +ROOT .* tuple\((.*?)\)", rest, re.M):
        for i, name in enumerate(NAME.findall(outputs)):
            if i in donated:
                found.setdefault(name, []).append(donated[i])
    return [arguments for arguments in found.values() if len(arguments) > 1]


def bytes_sent(text: str) -> int:
    """The bytes that a device sends in one run, at most."""
    bodies = {entry or name: block for entry, name, block in BODY.findall(text)}
    lines = [x for block in bodies.values() for x in LINE.findall(block)]
    sizes = dict.fromkeys((x[0] for x in lines), 0)
    for name, result, *_ in lines:
        for bits, shape in ARRAY.findall(result):
            length = prod(map(int, re.findall(r"\d+", shape)))
            sizes[name] += length * int(bits or 8) // 8
    found = [x for x in lines if re.fullmatch(SEND, x[2])]
    sends = {x[0]: re.findall(r"channel_id=\d+", x[3]) for x in found}
    if OTHER.search(text) or len(sends) != len(re.findall(rf" {SEND}\(", text)):
        raise ValueError(f"What this program sends cannot be read: {text[:80]}.")
    # A TPU splits an operation over fusions with one channel. The first one counts.
    started = {*START.findall(text)}
    split = {channel for name in started & {*sends} for channel in sends[name]}

    def sent(body: str) -> int:
        total = 0
        for name, _, opcode, rest in LINE.findall(bodies[body]):
            inner = [sent(x) for x in NAME.findall(" ".join(CALL.findall(rest)))]
            if name in started or name in sends and split.isdisjoint(sends[name]):
                given = sum(sizes[x] for x in NAME.findall(rest.split(")")[0]))
                # A start may return its operands too.
                total += max(given, sizes[name] - given * opcode.endswith("-start"))
            elif name not in sends and not opcode.endswith(("-done", "-update")):
                trips = _trips(rest, bodies) if opcode == "while" and any(inner) else 1
                total += max(inner) if opcode == "conditional" else trips * sum(inner)
        return total

    return sent("ENTRY ")


def _trips(loop: str, bodies: dict[str, str]) -> int:
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop):
        return int(known[1])
    # A TPU's program does not tell. If it counts otherwise, this unpacks nothing.
    condition, body = (bodies[x] for x in NAME.findall(" ".join(CALL.findall(loop))))
    if re.search(r"ROOT \S+ = pred\S+ get-tuple-element", condition):
        return 1
    [place] = re.findall(r" get-tuple-element\(\S+ index=(\d+)", condition)
    [bound] = re.findall(r" constant\((\d+)\)(?s:.*), direction=LT", condition)
    after = NAME.findall(re.findall(r" ROOT .* tuple\((.*?)\)", body)[0])[int(place)]
    while copied := re.findall(rf" %{re.escape(after)} = \S+ copy\(%(\S+?)\)", body):
        [after] = copied
    [step] = re.findall(rf" %{re.escape(after)} = \S+ add\(\S+, (\S+?)\)", body)
    [_] = re.findall(rf" {re.escape(step)} = \S+ constant\(1\)", body)
    return int(bound)
