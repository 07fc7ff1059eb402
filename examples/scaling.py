"""Calculates the bytes that a window sends between devices; no device is needed.

    python examples/scaling.py

Prints the tables of `docs/scaling.md`. `tests/examples/test_scaling.py` compares
the formulas with compiled programs.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Operation(NamedTuple):
    """A collective operation on arrays of the model's size.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"` or `"all-gather"`.
      of: the arrays to send: `"parameters"`, `"gradient"`, `"moments"` or `"sums"`.
      over: the axis whose devices send them to each other. Over `"replicas"`, each
        device sends only its shard.
    """

    kind: str
    of: str
    over: str


class Way(NamedTuple):
    """The operations of a window.

    Attributes:
      micro_batch: the operations in each of k micro-batches.
      close: the operations when the window closes, once.
      sums_over: the axis over which the sums are spread, if any.
    """

    micro_batch: tuple[Operation, ...]
    close: tuple[Operation, ...]
    sums_over: str | None


class Case(NamedTuple):
    """The sizes that determine the bytes.

    Attributes:
      k: micro-batches in a window.
      axes: the number of devices along each axis.
      parameters: the number of parameters whose gradient one device computes: the
        model's parameters, divided by the number of tensor-parallel devices.
      parameter_bytes: bytes of a parameter, and of an element of its gradient and
        moments.
      sum_bytes: bytes of an element of the accumulators.
    """

    k: int
    axes: dict[str, int]
    parameters: float
    parameter_bytes: int
    sum_bytes: int


GATHER = Operation("all-gather", "parameters", "data")
GATHER_MOMENTS = Operation("all-gather", "moments", "data")
SCATTER = Operation("reduce-scatter", "gradient", "data")
REDUCE = Operation("all-reduce", "gradient", "data")
IN_SHARDS = GATHER._replace(over="shards"), SCATTER._replace(over="shards")

WAYS = {
    "data parallel": Way((REDUCE,), (), None),
    "data parallel, deferred": Way((), (REDUCE._replace(of="sums"),), None),
    "ZeRO-2": Way((SCATTER,), (GATHER,), "data"),
    "ZeRO-2, whole moments": Way((SCATTER,), (GATHER, GATHER_MOMENTS), "data"),
    "FSDP": Way((GATHER, SCATTER), (), "data"),
    "FSDP, deferred": Way((GATHER,), (SCATTER._replace(of="sums"),), None),
    "HSDP": Way((*IN_SHARDS, REDUCE._replace(over="replicas")), (), "shards"),
    "HSDP, deferred over replicas": Way(
        IN_SHARDS, (Operation("all-reduce", "sums", "replicas"),), "shards"
    ),
}


class Layout(NamedTuple):
    """1,024 devices in hosts of 8.

    Attributes:
      axes: the number of devices along each axis.
      in_host: how many of these devices are in one host.
      parameters: as in `Case`.
      ways: names in `WAYS`.
    """

    axes: dict[str, int]
    in_host: dict[str, int]
    parameters: float
    ways: list[str]


LAYOUTS = {
    "128 x 8 tensor parallel": Layout(
        {"data": 128}, {"data": 1}, 70e9 / 8, list(WAYS)[:4]
    ),
    "1,024 FSDP": Layout({"data": 1024}, {"data": 8}, 70e9, list(WAYS)[4:6]),
    "128 x 8 HSDP": Layout(
        {"replicas": 128, "shards": 8},
        {"replicas": 1, "shards": 8},
        70e9,
        list(WAYS)[6:],
    ),
}
# Assumed GB/s that a device sends within its host, and out of its host.
WITHIN, BETWEEN = 400, 50


def bytes_of(operation: Operation, case: Case) -> float:
    """The bytes as `collectives` counts them: of the whole array, on one device."""
    each = {
        "parameters": case.parameter_bytes,
        "gradient": case.parameter_bytes,
        "moments": 2 * case.parameter_bytes,
        "sums": case.sum_bytes,
    }
    shards = case.axes["shards"] if operation.over == "replicas" else 1
    return case.parameters * each[operation.of] / shards


def wire_of(operation: Operation, case: Case) -> float:
    """The bytes that one device sends, in a ring."""
    devices = case.axes[operation.over]
    rounds = 2 if operation.kind == "all-reduce" else 1
    return rounds * (devices - 1) / devices * bytes_of(operation, case)


def out_of_host(operation: Operation, case: Case, in_host: dict[str, int]) -> float:
    """The part of `wire_of` that a device sends out of its host.

    A ring passes through all devices of a host before it leaves. There is one ring per
    device of the host: each leaves from a different device, with its part of the bytes.
    """
    devices = in_host[operation.over]
    leaves = devices < case.axes[operation.over]
    return leaves * wire_of(operation, case) / devices


def seconds_of(operation: Operation, case: Case, in_host: dict[str, int]) -> float:
    """The seconds of the slower network; both are used at the same time."""
    out = out_of_host(operation, case, in_host)
    return max(out / BETWEEN, (wire_of(operation, case) - out) / WITHIN) / 1e9


def in_window(way: Way, case: Case) -> list[Operation]:
    """All operations of a window."""
    return [*way.micro_batch * case.k, *way.close]


def sums_on_a_device(way: Way, case: Case) -> float:
    """Bytes of the accumulators that one device holds."""
    devices = case.axes[way.sums_over] if way.sums_over else 1
    return case.parameters * case.sum_bytes / devices


def formula(way: Way) -> str:
    """The formula for a window's wire bytes, without the factor (n - 1) / n."""
    letters = {"parameters": "P", "gradient": "G", "moments": "M", "sums": "A"}
    terms = [
        ("2 " if operation.kind == "all-reduce" else "")
        + times
        + letters[operation.of]
        + (" / S" if operation.over == "replicas" else "")
        for times, operations in (("k ", way.micro_batch), ("", way.close))
        for operation in operations
    ]
    return " + ".join(terms)


def in_words(operations: Iterable[Operation]) -> str:
    """Names what is sent, and over which axis if it is not `"data"`."""
    words = [
        f"{kind} of {of}" + (f" over {over}" if over != "data" else "")
        for kind, of, over in operations
    ]
    return ", ".join(words) or "nothing"


def print_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Prints a Markdown table and an empty line."""
    header = list(header)
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    """Prints what is sent, how it grows with k, and the bytes of a large model."""
    spread = {None: "A", "data": "A / D", "shards": "A / S"}
    print_table(
        ["way", "every micro-batch", "close", "wire", "sums on a device"],
        [
            [
                name,
                in_words(way.micro_batch),
                in_words(way.close),
                formula(way),
                spread[way.sums_over],
            ]
            for name, way in WAYS.items()
        ],
    )

    print("Wire of a window in gradients, 8 devices (HSDP: 2 x 4), all in float32:\n")
    ks = (1, 4, 16, 64)
    small = Case(1, {"data": 8, "replicas": 2, "shards": 4}, 0.25, 4, 4)
    print_table(
        ["way", *(f"k = {k}" for k in ks), "sums on a device"],
        [
            [name]
            + [
                f"{sum(wire_of(o, case) for o in in_window(way, case)):.2f}"
                for case in (small._replace(k=k) for k in ks)
            ]
            + [f"{sums_on_a_device(way, small):.2f}"]
            for name, way in WAYS.items()
        ],
    )

    print(
        "70 B parameters in bfloat16, 1,024 devices in hosts of 8, k = 16, GB of 10^9"
    )
    print("bytes. Assumed, and not measured: every device sends at most")
    print(f"{BETWEEN} GB/s out of its host and {WITHIN} GB/s within it.\n")
    rows = []
    for name, layout in LAYOUTS.items():
        for way in layout.ways:
            for dtype, sum_bytes in (("float32", 4), ("bfloat16", 2)):
                case = Case(16, layout.axes, layout.parameters, 2, sum_bytes)
                sent = in_window(WAYS[way], case)
                gigabytes = (
                    sum(bytes_of(o, case) for o in sent),
                    sum(wire_of(o, case) for o in sent),
                    sum(out_of_host(o, case, layout.in_host) for o in sent),
                    sums_on_a_device(WAYS[way], case),
                )
                *moved, sums = (f"{x / 1e9:,.1f}" for x in gigabytes)
                seconds = sum(seconds_of(o, case, layout.in_host) for o in sent)
                rows.append([name, way, dtype, *moved, f"{seconds:.1f}", sums])
    print_table(
        [
            "layout",
            "way",
            "sums",
            "`collectives`, GB",
            "wire, GB",
            "out of the host, GB",
            "seconds",
            "sums on a device, GB",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
