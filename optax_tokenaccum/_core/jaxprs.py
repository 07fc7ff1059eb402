"""Jaxprs: the names and parameters of JAX's operations, and ways to walk through them.

No other file names an operation of a jaxpr or one of its parameters. The names hold for
jax 0.8.1 to 0.12, unless a comment says otherwise. An operation that is not known here
may have derivative rules of its own: nothing is passed on through it, and its backward
pass is checked. To support a new operation, or a new name of one, change this file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core import primitives as jax_primitives
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import ArrayLike

Atom = Var | Literal
Trace = Jaxpr | ClosedJaxpr
T = TypeVar("T")

# With the flags jax_custom_jvp3, jax_custom_vjp3 and jax_remat3 (jax 0.12), these are
# classes, and all have the primitive `call_hi_primitive`, whose parameter `_prim` is an
# instance. Its attribute `params` has the parameters.
_CLASSES = {
    "CheckpointName": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "RematTraced": "remat2",
}
TRANSPOSE = "transpose"
_CALLS = "jit", jax_primitives.closed_call_p.name  # newer jax: eval_jaxpr
_CUSTOM = "custom_jvp_call", "custom_vjp_call"  # their values are those of a call
# Operations of JAX that `jax.extend` does not list in every version.
_UNLISTED = {"name", "optimization_barrier", "random_unwrap", "random_wrap", "remat2"}
_UNLISTED |= {"pcast", "pvary", "reshard", "shard_map", "split"}


def operation(eqn: JaxprEqn) -> str:
    """The name of what an equation does, the same in all versions of JAX."""
    if "_prim" not in eqn.params:
        return eqn.primitive.name
    name = type(eqn.params["_prim"]).__name__
    return _CLASSES.get(name, name)


def _params(eqn: JaxprEqn) -> Mapping[str, Any]:
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def is_scan(eqn: JaxprEqn) -> bool:
    return operation(eqn) == "scan"


def is_remat(eqn: JaxprEqn) -> bool:
    return operation(eqn) == "remat2"


def is_call(eqn: JaxprEqn) -> bool:
    return operation(eqn) in _CALLS


def is_slice(eqn: JaxprEqn) -> bool:
    return operation(eqn) == "dynamic_slice"


def stops_gradient(eqn: JaxprEqn) -> bool:
    return operation(eqn) == "stop_gradient"


def has_rules(traced: Trace) -> bool:
    """Whether an operation may have derivative rules that its trace does not show."""
    listed = {x for x in vars(jax_primitives).values() if isinstance(x, Primitive)}
    return any(
        operation(eqn).startswith("custom_")
        or not (eqn.primitive in listed or operation(eqn) in _UNLISTED)
        for eqn in equations(traced)
    )


def asks_for_device(traced: Trace) -> bool:
    return any(operation(eqn) == "axis_index" for eqn in equations(traced))


def collectives(traced: Trace) -> Iterator[tuple[str, set[str]]]:
    """Yields the operations by which devices send each other values, and their axes."""
    for eqn in as_jaxpr(traced).eqns:
        axes = [_params(eqn).get(name, ()) for name in ("axis_name", "axes")]
        names = {axis for axis in jax.tree.leaves(axes) if isinstance(axis, str)}
        if names and operation(eqn) not in ("axis_index", "pcast", "pvary"):
            yield operation(eqn), names
        # Those of an inner shard_map, whose name differs between versions of jax.
        of_inner = ("manual_axes", "newly_manual_axes")
        own = {axis for name in of_inner for axis in _params(eqn).get(name, ())}
        for inner in subjaxprs(eqn):
            for name, names in collectives(inner):
                if names - own:
                    yield name, names - own


def equations(traced: Trace) -> Iterator[JaxprEqn]:
    """Yields the operations of a traced function, those of inner functions too."""
    for eqn in as_jaxpr(traced).eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from equations(inner)


def subjaxprs(eqn: JaxprEqn) -> list[Any]:
    """The traced functions that an operation calls, repeats or chooses from."""
    values = [x if isinstance(x, tuple | list) else [x] for x in _params(eqn).values()]
    found = [
        x.jaxpr if isinstance(x, jax.stages.Traced) else x for xs in values for x in xs
    ]
    return [x for x in found if hasattr(as_jaxpr(x), "eqns")]


def as_jaxpr(traced: Trace) -> Any:
    """The trace of a function, without its constants."""
    return getattr(traced, "jaxpr", traced)


def aval(x: Atom) -> Any:
    return x.aval


def without_consts(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """A trace that holds no values, and its constants."""
    jaxpr, consts = closed.jaxpr, [*map(as_array, closed.consts)]
    if hasattr(jaxpr, "with_consts"):  # newer jax, where it holds them
        jaxpr = jaxpr.with_consts([None] * len(consts))
    return jaxpr, consts


def as_array(constant: Any) -> Any:
    """A constant of a trace as an array of JAX, which traced numbers can index."""
    if isinstance(constant, jax.Array) or not hasattr(constant, "__array__"):
        return constant
    with jax.ensure_compile_time_eval():
        return jax.device_put(constant)


def evaluate_some(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], read: Callable[[Atom], Any]
) -> dict[Atom, Any]:
    """The outputs of some operations of `jaxpr`, which `read` what is given to them."""
    outvars = [x for eqn in eqns for x in eqn.outvars]
    invars = {x: None for eqn in eqns for x in eqn.invars if isinstance(x, Var)}
    given = [x for x in invars if x not in {*outvars}]
    part = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=outvars,
        eqns=[*eqns],
        effects={x for eqn in eqns for x in eqn.effects},
    )
    outputs = jax.core.eval_jaxpr(part, (), *map(read, given))
    return dict(zip(outvars, outputs, strict=True))


# What can be done to a parameter before it is read: `keeps_parameter` lists it, and the
# next two functions do it to the value and to the order of the axes.


def keeps_parameter(eqn: JaxprEqn) -> bool:
    """Whether a perturbation can stand for what an operation makes of a parameter.

    A cast to fewer bits is one: its gradient is cast to more bits, and loses none. So
    is one from 16 bits to more, whose gradient is then not rounded to 16 bits.
    """
    name, params = operation(eqn), _params(eqn)
    if name == "convert_element_type":
        old, new = (aval(x).dtype for x in (*eqn.invars, *eqn.outvars))
        are_floats = all(jnp.issubdtype(x, jnp.floating) for x in (old, new))
        if params["sharding"] or not are_floats:
            return False
        bits = jnp.finfo(old).bits
        return old == new or bits == 16 or jnp.finfo(new).bits < bits
    if name == "jit":
        given = [*params["in_shardings"], *params["out_shardings"]]
        return not any(isinstance(x, jax.sharding.Sharding) for x in given)
    return name in (TRANSPOSE, "name", "remat2", *_CALLS)


def apply_to_value(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """`x` after such an operation, which calls no function."""
    name, params = operation(eqn), _params(eqn)
    if name == TRANSPOSE:
        return jax.lax.transpose(x, params["permutation"])
    if name == "name":
        return checkpoint_name(x, params["name"])
    return x.astype(params["new_dtype"])


def apply_to_axes(eqn: JaxprEqn, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes after such an operation."""
    order = _params(eqn).get("permutation", range(len(axes)))
    return tuple(axes[i] for i in order)


def remat_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keywords of `jax.checkpoint`."""
    params = _params(eqn)
    prevent_cse = params["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # one for each input
        prevent_cse = any(prevent_cse)
    return {"prevent_cse": prevent_cse, "policy": params["policy"]}


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keywords of `jax.lax.scan`."""
    names = {"length", "reverse", "unroll", "_split_transpose"} & eqn.params.keys()
    return {name: eqn.params[name] for name in names}


def carry_of(eqn: JaxprEqn) -> tuple[int, int]:
    """The first input of a scan that is in the carry, and the first after it."""
    # Sliced inputs and stacked outputs have one axis less in the body. The parameters
    # of the equation say which these are too, but differ between versions of jax.
    [body] = map(as_jaxpr, subjaxprs(eqn))
    last = sum(map(eq, map(_rank, eqn.invars), map(_rank, body.invars)))
    return last - sum(map(eq, map(_rank, eqn.outvars), map(_rank, body.outvars))), last


def _rank(x: Atom) -> int:
    return len(getattr(aval(x), "shape", ()))


def changed_paths(f: Callable[[T], T], given: T, returned: T) -> list[str]:
    """The paths of what `f` changes; `returned` is what it returned for `given`.

    nnx.remat and nnx.jit write everything back, mostly as it was.
    """
    paths, paths_after = (
        [keystr(path, simple=True, separator="/") for path, _ in leaves]
        for leaves in map(tree_leaves_with_path, (given, returned))
    )
    if paths != paths_after:
        return sorted({*paths} ^ {*paths_after})
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(returned), strict=True)
    if all(x is y for x, y in pairs):
        return []
    sources = sources_of(jax.make_jaxpr(f)(given).jaxpr)
    return [path for i, path in enumerate(paths) if sources[i] != i]


def sources_of(
    jaxpr: Jaxpr, inputs: Sequence[int | None] | None = None
) -> list[int | None]:
    """Which of the inputs each output is, through calls and loops."""
    inputs = range(len(jaxpr.invars)) if inputs is None else inputs
    sources = dict(zip(jaxpr.invars, inputs, strict=True))

    def source(x: Atom) -> int | None:
        return None if isinstance(x, Literal) else sources.get(x)

    for eqn in jaxpr.eqns:
        called = [*map(as_jaxpr, subjaxprs(eqn))]
        is_known = operation(eqn) in (*_CALLS, *_CUSTOM, "remat2", "scan", "shard_map")
        if is_known and [len(x.invars) for x in called] == [len(eqn.invars)]:
            given = [*map(source, eqn.invars)]
            through = _sources_of_scan if is_scan(eqn) else _sources_of_call
            outputs = through(eqn, given)
            sources.update(zip(eqn.outvars, outputs, strict=False))
    return [*map(source, jaxpr.outvars)]


def _sources_of_call(eqn: JaxprEqn, given: list[int | None]) -> list[int | None]:
    return sources_of(as_jaxpr(subjaxprs(eqn)[0]), given)


def _sources_of_scan(eqn: JaxprEqn, given: list[int | None]) -> list[int | None]:
    """What is carried to its own place, and what is taken and stacked."""
    first, last = carry_of(eqn)
    inner = sources_of(as_jaxpr(subjaxprs(eqn)[0]))
    carried = [x == first + i for i, x in enumerate(inner[: last - first])]
    stacked = [x is not None and x >= last for x in inner[last - first :]]
    pairs = zip(inner, [*carried, *stacked], strict=True)
    return [given[x] if x is not None and is_kept else None for x, is_kept in pairs]


class Pruned(NamedTuple):
    """One output of a traced function, by dead-code elimination."""

    jaxpr: Jaxpr
    consts: Sequence[ArrayLike]
    args: Sequence[ArrayLike]
    needed: list[bool]  # of the inputs

    def value(self) -> jax.Array:
        given = {*self.jaxpr.invars, *self.jaxpr.constvars}
        if any(operation(eqn) == "io_callback" for eqn in equations(self.jaxpr)) or any(
            not _refs(eqn).isdisjoint(given) for eqn in self.jaxpr.eqns
        ):
            raise ValueError(
                "num_tokens must not depend on an io_callback, which would run twice, "
                "or on a mutable array from outside of the loss. Give it with the "
                "batch."
            )
        [value] = jax.core.eval_jaxpr(self.jaxpr, self.consts, *self.args)
        return value


def inputs_of(jaxpr: Jaxpr, output: int) -> list[bool]:
    """Which inputs an output, or a derivative of it, may depend on."""
    return _pruned(jaxpr, output)[1]


def pruned(
    jaxpr: Jaxpr, consts: Sequence[ArrayLike], inputs: Sequence[ArrayLike], output: int
) -> Pruned:
    kept, needed = _pruned(jaxpr, output)
    if any(needed):
        kept, needed = _pruned(_without_rules(jaxpr), output)
    args = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    return Pruned(kept, consts, args, needed)


def _pruned(jaxpr: Jaxpr, output: int) -> tuple[Jaxpr, list[bool]]:
    """Without effects, except on mutable arrays of its own that the output needs."""
    own = {x for eqn in jaxpr.eqns for x in eqn.outvars}
    refs: set[Var] = set()
    while True:
        # Dead-code elimination would keep a print.
        eqns = [
            x.replace(effects=set()) if x.effects and _refs(x).isdisjoint(refs) else x
            for x in jaxpr.eqns
        ]
        effects = {x for eqn in eqns for x in eqn.effects}
        kept, needed = dce_jaxpr(
            jaxpr.replace(eqns=eqns, effects=effects),
            [i == output for i in range(len(jaxpr.outvars))],
        )
        found = {x for eqn in kept.eqns for x in _refs(eqn)} & own
        if found <= refs:
            return kept, needed
        refs |= found


def _refs(eqn: JaxprEqn) -> set[Var]:
    """The mutable arrays that an operation is given."""
    given = (x for x in eqn.invars if isinstance(x, Var))
    return {x for x in given if hasattr(aval(x), "inner_aval")}


def _without_rules(jaxpr: Jaxpr) -> Jaxpr:
    """A trace in which calls that have derivatives of their own are plain calls.

    Dead-code elimination keeps all inputs of a call with derivatives of its own.
    """

    def plain(eqn: JaxprEqn) -> JaxprEqn:
        name, called = operation(eqn), subjaxprs(eqn)
        if name != "jit" and name not in _CUSTOM:
            return eqn
        if len(called[0].jaxpr.invars) != len(eqn.invars):
            return eqn  # it has inputs that only its rules take
        inner = called[0].replace(jaxpr=_without_rules(called[0].jaxpr))
        if name == "jit":
            return eqn.replace(params=eqn.params | {"jaxpr": inner})
        call, params = jax_primitives.closed_call_p, {"call_jaxpr": inner}
        return eqn.replace(primitive=call, params=params)

    return jaxpr.replace(eqns=[*map(plain, jaxpr.eqns)])
