"""Lists what a compiled program sends between devices."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from optax_tokenaccum.compiled._replica_groups import axes_of
from optax_tokenaccum.compiled._reports import as_compiled, table
from optax_tokenaccum.compiled._text import KINDS, PATHS, Collective, Program


@dataclass(frozen=True)
class CollectiveReport:
    """The result of `collectives`, which `print` shows as a table.

    Attributes:
      entries: what one run of the program sends at most, by `kind` of operation,
        `axes`, `groups` of devices, `path` and `times`; most bytes first. `path` is
        `"always"`, or `"conditional"` in a branch of a conditional or in a loop that
        runs at most once. `times` is the trip count of their loop, 1 without a loop,
        `None` if it is not known. `instructions` is how many the program's text has,
        and `bytes` the size of all their arrays. So a device sends `times * bytes` in
        one run.
      mesh: the size of every axis of the program's mesh; `None` if it has no mesh.
      num_devices: the number of devices that the program runs on.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum.compiled import collectives
      >>> report = collectives(jax.jit(jnp.sum).lower(jnp.ones(8)).compile())
      >>> print(report)
      No collective operations on 1 device.
      >>> report.bytes(kind="all-reduce", path="always")
      0
    """

    entries: tuple[Collective, ...]
    mesh: dict[str, int] | None
    num_devices: int

    def bytes(
        self,
        kind: str | None = None,
        axes: str | Sequence[str] | None = None,
        path: str | None = None,
    ) -> int:
        """Adds up the bytes that one run of the program sends at most, on one device.

        It is the sum of `times * bytes` of `entries`, and more than any run sends where
        branches of a conditional differ in kinds of operations or groups of devices.

        Args:
          kind: only operations of this kind, such as `"all-reduce"`.
          axes: only operations between devices that differ along this mesh axis, or
            along one of these axes, whether or not they also differ along others.
          path: only `"always"`, what every run sends, or only `"conditional"`.

        Raises:
          ValueError: if the kind, axis or path does not exist and so could never match;
            or if an operation is in a loop whose trip count the program does not give.
        """
        along = {axes} if isinstance(axes, str) else {*(axes or ())}
        if along and self.mesh is None:
            raise ValueError(
                "axes must be those of a mesh in the shardings of the program's inputs "
                f"or outputs: got {axes!r}, and none has a NamedSharding. Look at "
                "report.entries, which list the devices of every group."
            )
        for name, given, known in (
            ("kind", {kind}, KINDS),
            ("path", {path}, PATHS),
            ("axes", along, self.mesh or ()),
        ):
            if unknown := given - {None, *known}:
                raise ValueError(
                    f"{name} must be among {', '.join(known)}: got "
                    f"{', '.join(map(str, unknown))}. Anything else would find "
                    "nothing, whatever the program does."
                )
        total = 0
        for entry in self.entries:
            if (
                kind not in (None, entry.kind)
                or path not in (None, entry.path)
                or (along and along.isdisjoint(entry.axes or ()))
            ):
                continue
            if entry.times is None:
                raise ValueError(
                    "Bytes add up only where the program says how often a loop runs: "
                    f"got {entry.bytes:,} bytes of {entry.kind} in one of unknown "
                    "length. Add report.entries up with the trips that you know, or "
                    "make the bounds of the loop Python integers."
                )
            total += entry.times * entry.bytes
        return total

    def __str__(self) -> str:
        devices = f"{self.num_devices} device{'s' * (self.num_devices > 1)}"
        if self.mesh:
            sizes = (f"{name}={size}" for name, size in self.mesh.items())
            devices += f" ({', '.join(sizes)})"
        if not self.entries:
            return f"No collective operations on {devices}."
        rows = [
            (x.bytes, x.times, x.instructions, x.kind, self._over(x), x.path)
            for x in self.entries
        ]
        header = "bytes", "times", "instructions", "kind", "over", "path"
        title = f"Collective operations on {devices}, bytes on each:"
        return table(title, [header, *rows], ">>><<<")

    def _over(self, entry: Collective) -> str:
        size, is_pairs = len(entry.groups[0]), entry.kind == "collective-permute"
        if entry.axes is None or self.mesh is None:
            return f"{len(entry.groups)} {'pairs' if is_pairs else f'x {size} devices'}"
        whole = math.prod(self.mesh[axis] for axis in entry.axes)
        part = "" if is_pairs or size == whole else f" ({size} of {whole})"
        return ", ".join(entry.axes) + part


def collectives(compiled: jax.stages.Compiled) -> CollectiveReport:
    """Counts the collective operations of a compiled program, and their bytes.

    If each device sums its gradients until the window closes, the program of a
    micro-batch does not send any gradient. A change that loses this deferral computes
    the same numbers, only slower; use `collectives` in a test that detects the change.
    If a step has two programs, test both. If it has a single program, as with a token
    budget, and `reduce_every="window"`, the path `"always"` runs for every micro-batch,
    and the path `"conditional"` in addition when the window closes. In other steps, a
    backward pass that communicates may be `"conditional"` as well, because it does not
    run for a micro-batch without tokens.

    Only one branch of a conditional runs. So for each kind of operation and each set of
    groups of devices, the report has the operations of the branch that sends the most
    bytes of these. For example, the branch of the backward pass gathers parameters, and
    so does the branch without tokens if it runs the forward pass for `aux` or for
    statistics. Operations in loops of unknown length are compared with each other only,
    by their bytes each time.

    Bytes are the size of the whole array on one device: of an operation's result, or of
    the operand of a reduce-scatter, whose result is one shard. So the reduce-scatter of
    a gradient into shards, the all-gather of these shards, and the all-reduce of the
    gradient all have the bytes of the gradient. On the wire, in a ring of n devices,
    each device sends (n - 1) / n of these bytes for a reduce-scatter or an all-gather,
    and twice as much for an all-reduce. Groups of one device send nothing and are left
    out.

    `collectives` reads the program's text after all optimizations. XLA merges, splits,
    moves and widens collective operations (a CPU reduces bfloat16 in float32),
    differently on each backend, so bytes by axis say more than instructions. A TPU may
    gather or scatter in a loop of collective permutes, each of one shard. The trip
    count of a loop is known if its bounds are constants, as those of a scan are. Data
    that custom calls send is not counted.

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, of
        `step.accumulate.lower(state, batch).compile()` and the like, or of
        `nnx.jit(f).lower(...).compile()`.

    Returns:
      A `CollectiveReport`. It names groups of devices by the axes of the mesh in the
      shardings of the program's inputs and outputs.

    Raises:
      TypeError: if `compiled` is not a compiled program.
      ValueError: if the backend does not give the program's text, or if the text cannot
        be read.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> from optax_tokenaccum import make_train_step
      >>> from optax_tokenaccum.compiled import collectives
      >>> rows = NamedSharding(Mesh(jax.devices()[:1], "data"), PartitionSpec("data"))
      >>> step = make_train_step(lambda p, x: (jnp.sum(p * x), x.size), optax.sgd(1.0))
      >>> state, batch = step.init(jnp.zeros(())), jax.device_put(jnp.ones(8), rows)
      >>> report = collectives(step.accumulate.lower(state, batch).compile())
      >>> print(report)
      No collective operations on 1 device (data=1).
      >>> assert report.bytes(axes="data") < 100  # a gradient has more
    """
    compiled = as_compiled(compiled, "collectives")
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "The backend must give the text of a compiled program: got None from "
            "compiled.as_text(). Compile for another backend, such as CPU."
        )
    program = Program(text)
    mesh = _mesh_of(compiled, program.num_devices)
    found = defaultdict(list)
    for operation in program.operations():
        found[operation._replace(bytes=0)].append(operation.bytes)
    entries = []
    for alike, sizes in found.items():
        axes = None if mesh is None else axes_of(alike.groups, mesh)
        total = {"instructions": len(sizes), "bytes": sum(sizes)}
        entries.append(alike._replace(axes=axes, **total))
    entries.sort(key=lambda entry: -entry.bytes * (entry.times or 1))
    return CollectiveReport(tuple(entries), mesh, program.num_devices)


def _mesh_of(compiled: jax.stages.Compiled, num_devices: int) -> dict[str, int] | None:
    """The axes of the finest mesh of any input or output.

    jax requires all meshes to have the same order of devices, the program's order.
    """
    # The oldest supported jax raises AttributeError for the shardings of a pmap.
    names = "input_shardings", "output_shardings"
    shardings = [getattr(compiled, name, None) for name in names]
    meshes = [
        dict(x.mesh.shape)
        for x in jax.tree.leaves(shardings)
        if isinstance(x, jax.sharding.NamedSharding) and x.mesh.size == num_devices
    ]
    return max(meshes, key=len, default=None)
