"""The loss as a function of perturbations: gradients layer by layer, in float32.

A perturbation is an input of zeros that receives the cotangent of a parameter, as in
Flax. It has the shape of the parameter and the dtype of its sum, at least float32; its
value is never read. The loss is evaluated with `perturbed(parameter, perturbation)` in
place of each parameter. Where a scan takes a parameter layer by layer, also after a
cast, a transposition or inside of `jax.checkpoint`, the scan takes the perturbation
too, so that the gradient of each layer is made in the scan, in the dtype of the sum. A
large parameter that a scan is given whole is perturbed in the scan, too.

The traces of a loss with three layers `w`, before and after, shortened; `d` is the
perturbation of `w`, and `n` the number of tokens:

    { lambda ; w:f32[3,4,4] x:bf16[4]. let
        y:bf16[4] = scan[length=3 jaxpr={ lambda ; x:bf16[4] w:f32[4,4]. let
            v:bf16[4,4] = convert_element_type[new_dtype=bfloat16] w
            y:bf16[4] = dot_general x v
          in (y,) }] x w
      in (sum y,) }

    { lambda w:f32[3,4,4] x:bf16[4]; d:f32[3,4,4] n:f32[]. let
        y:bf16[4] = scan[length=3 jaxpr={ lambda ; x:bf16[4] w d:f32[4,4]. let
            v:bf16[4,4] = convert_element_type[new_dtype=bfloat16] w
            v:bf16[4,4] = custom_vjp_call[name=perturbed] v d n  # its value is v
            y:bf16[4] = dot_general x v
          in (y,) }] x w d
      in (sum y,) }
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from optax_tokenaccum._core.jaxprs import (
    Atom,
    Pruned,
    Trace,
    apply_to_axes,
    apply_to_value,
    as_array,
    as_jaxpr,
    carry_of,
    evaluate_some,
    inputs_of,
    is_call,
    is_remat,
    is_scan,
    is_slice,
    keeps_parameter,
    operation,
    pruned,
    remat_options,
    scan_options,
    sources_of,
    stops_gradient,
    subjaxprs,
    without_consts,
)
from optax_tokenaccum._core.trees import (
    DType,
    Leaf,
    Params,
    Tree,
    is_concrete,
    is_float,
    num_devices,
    unshared_zero,
)

# A perturbation for each parameter; `None` for one that cannot be differentiated.
Perturbations = list[jax.Array | None]


def contribution(x: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
    """What `x`, a gradient or a loss, adds to a sum; `num_tokens` is its count.

    `None` is a count that is known, while tracing, to be positive.

    Without tokens that is what is finite: 0/0 adds nothing, and a loss that is real
    while its count is 0 is added. A count of -1 is not usable, and adds nothing.
    """
    if num_tokens is None or (is_concrete(num_tokens) and num_tokens > 0):
        # Where counts are traced, the check for finite values, a second reader, keeps
        # XLA from moving the all-reduce of a gradient out of the loop over a window, to
        # wrong sums (off by 0.8 of an embedding: jaxlib 0.10.1 to 0.11.2 on several
        # GPUs, libtpu 0.0.48). Here this operation does.
        return rounded(x)
    return _contribution(x, num_tokens)


@jax.jit
def _contribution(x: jax.Array, num_tokens: jax.Array) -> jax.Array:
    keeps = (num_tokens > 0) | ((num_tokens == 0) & jnp.isfinite(x))
    return jnp.where(keeps, x, unshared_zero(x.dtype, num_tokens))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def perturbed(
    dtype: DType,  # of the perturbation, which the backward rule does not see
    value: jax.Array,
    perturbation: jax.Array,
    num_tokens: jax.Array | None,
) -> jax.Array:
    """`value`, as a function of `perturbation`; its gradient is `contribution`."""
    return value


def _perturbed_forward(
    dtype: DType,
    value: jax.Array,
    perturbation: jax.Array,
    num_tokens: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    return value, num_tokens


def _perturbed_backward(
    dtype: DType, num_tokens: jax.Array | None, cotangent: jax.Array
) -> tuple[None, jax.Array, None]:
    return None, contribution(cotangent.astype(dtype), num_tokens), None


perturbed.defvjp(_perturbed_forward, _perturbed_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameter:
    """A parameter with a perturbation, or what casts and transpositions made of it."""

    value: Leaf
    leaf: int = field(metadata={"static": True})  # of the parameters
    # Of the perturbation, in order.
    axes: tuple[int, ...] = field(metadata={"static": True})


class LayerPerturbations(NamedTuple):
    """The perturbations in scope: of all parameters or, in a scan, of one layer."""

    arrays: dict[int, jax.Array]  # by the leaf of the parameters
    layered: set[int]  # the leaves that scans take layer by layer
    num_tokens: jax.Array | None
    in_loop: bool = False

    def read(self, x: Leaf | Parameter) -> Leaf:
        if not isinstance(x, Parameter):
            return x
        array = jnp.transpose(self.arrays[x.leaf], x.axes)
        if x.leaf in self.layered:
            # Rounded, because JAX cannot add to one array both from a scan over it and
            # from another use, unless there is an operation in between; and XLA's
            # while-loop-all-reduce-code-motion would keep two more buffers of the
            # gradient's size (data parallel on an H200: 3586 -> 7248 MB). Layers alone:
            # a tied embedding's gradient would not be added to that of its lookup (on a
            # CPU 1.24 -> 1.52 of gradients alone).
            array = _row_by_row_p.bind(rounded(array))
        else:
            return _perturbed_whole(x.value, array, self.num_tokens)
        return perturbed(array.dtype, x.value, array, self.num_tokens)

    def read_slice(self, x: Parameter, starts: Sequence[Leaf], shape: Any) -> Leaf:
        """A slice of a large parameter, whose gradient is added to that of its sum."""
        # JAX would add the number of rows to a negative index again.
        bounds = zip(starts, jnp.shape(x.value), shape, strict=True)
        starts = [jnp.clip(start, 0, n - size) for start, n, size in bounds]
        order = [x.axes.index(axis) for axis in range(len(x.axes))]
        array = jax.lax.dynamic_slice(
            self.arrays[x.leaf], [starts[i] for i in order], [shape[i] for i in order]
        )
        value = jax.lax.dynamic_slice(x.value, starts, shape)
        array = jnp.transpose(array, x.axes)
        return perturbed(array.dtype, value, array, self.num_tokens)


@jax.jit
def _perturbed_whole(value: Leaf, array: jax.Array, n: jax.Array | None) -> jax.Array:
    # Multiply by 1: JAX sees an operation, XLA removes it. Without it, `with_refs`
    # would add the gradient of a lookup to rows of the sum: to wrong rows if a negative
    # index was clamped. Over devices, it would also gather the sum.
    return perturbed(array.dtype, value, array * np.ones((), array.dtype), n)


# A perturbation, and so its cotangent, lies in memory row by row. XLA might choose
# another layout for the sums in a loop that adds to them, and copy them (FSDP on an
# H200: 782 -> 958 MB). It is JAX's layout constraint, except in programs for
# `jax.export`, which refuses to serialize that.
_row_by_row_p = Primitive("row_by_row")
_row_by_row_p.def_impl(lambda x: x)
_row_by_row_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_row_by_row_p, lambda cotangent, _: [_row_by_row_p.bind(cotangent)])
batching.primitive_batchers[_row_by_row_p] = lambda xs, axes: (xs[0], axes[0])


def _lower_row_by_row(context: Any, x: Any) -> Any:
    parameters = context.module_context.lowering_parameters
    if getattr(parameters, "for_export", False):
        return [x]

    def constrained(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return mlir.lower_fun(constrained, multiple_results=False)(context, x)


mlir.register_lowering(_row_by_row_p, _lower_row_by_row)


def rounded(x: jax.Array) -> jax.Array:
    """`x`, rounded to its own dtype, which changes nothing: an operation in between."""
    if jnp.iscomplexobj(x):
        return x * np.ones((), x.dtype)
    dtype = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)


# What reads a parameter: an operation, by its name, or a scan that takes layers along
# an axis, by this axis.
Consumers = dict[int, set[int | str]]  # by the leaf of the parameters
# An operation in a loop that is given all of a large parameter, and perturbs it inside.
IN_LOOP = "in a loop"
# A loop that is given all of a parameter that is small, or in the carry, or that it
# also takes layer by layer: its gradient leaves the loop whole.
GIVEN_ALL = "a loop that is given all of it"
# A scan that takes the layers along the first axis.
FIRST_AXIS = 0
# The elements from which on a parameter that a loop is given whole adds its gradient in
# every iteration. In smaller ones, the memory is not worth the time of the additions.
LARGE = 2**20


class PerturbedLoss(NamedTuple):
    """A loss as a function of perturbations.

    `evaluate(args, perturbations)` returns `loss_sum, (num_tokens, rest)`. It must not
    hold values of a trace, because a `custom_vmap` maps nothing but arguments, and
    because jax keeps in its caches what a traced function holds.
    """

    evaluate: Callable[[Tree, Perturbations], tuple[jax.Array, tuple[jax.Array, Tree]]]
    args: Tree
    consumers: Consumers

    def __call__(self, perturbations: Perturbations) -> Any:
        return self.evaluate(self.args, perturbations)


def traced_perturbed_loss(
    loss: Callable[[Perturbations], Any],
    perturbations: Perturbations,
    consumers: Consumers,
) -> PerturbedLoss:
    """Of a loss that holds values, and that fills `consumers` while it is traced.

    Its own trace has no values, and may be run under `custom_vmap`.
    """
    closed, shapes = jax.make_jaxpr(loss, return_shape=True)(perturbations)
    jaxpr, consts = without_consts(closed)
    structure = jax.tree.structure(shapes)

    def evaluate(consts: list[Leaf], perturbations: Perturbations) -> Any:
        outputs = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(perturbations))
        return structure.unflatten(outputs)

    return PerturbedLoss(evaluate, consts, consumers)


class LossJaxpr:
    """The trace of `loss(params, *args)`, to be evaluated with perturbed parameters.

    The loss returns `loss_sum, (num_tokens, rest)`.
    """

    def __init__(self, loss: Callable[..., Any], params: Params, *args: Any):
        self.closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, *args)
        self.structure = jax.tree.structure(shapes)
        self.inputs = jax.tree.leaves((params, *args))
        self.num_params = len(jax.tree.leaves(params))

    def numbers(self) -> Tree:
        """The number of each output, in the place of it."""
        return self.structure.unflatten(range(self.structure.num_leaves))

    def sources(self) -> list[int | None]:
        """The number of the input that each output is, if it is one."""
        return sources_of(self.closed.jaxpr)

    def reads(self, output: int) -> list[bool]:
        """Whether an output may depend on each input."""
        return inputs_of(self.closed.jaxpr, output)

    def pruned(self, output: int) -> Pruned:
        closed = self.closed
        return pruned(closed.jaxpr, closed.consts, self.inputs, output)

    @functools.cached_property
    def consumers(self) -> Consumers:
        """What reads each parameter that can be differentiated."""
        params = enumerate(self.inputs[: self.num_params])
        known = [_parameter(i, x) if is_float(x) else None for i, x in params]
        rest = [None] * (len(self.inputs) - self.num_params)
        return _consumers_of(self.closed, [*known, *rest])[0]

    def axes_of_layers(self) -> dict[int, int]:
        """The axes of parameters, by their leaves, along which scans take layers."""
        read = self.consumers.items()
        axes = {i: [x for x in by if isinstance(x, int)] for i, by in read}
        return {i: min(found) for i, found in axes.items() if found}

    def perturbed_loss(self, num_tokens: jax.Array | None = None) -> PerturbedLoss:
        """The loss as a function of perturbations, `None` where none is.

        `num_tokens` is the count, if it is known.
        """
        jaxpr, consts = without_consts(self.closed)
        structure, consumers = self.structure, self.consumers
        layered = {leaf for leaf, found in consumers.items() if FIRST_AXIS in found}
        # A number that is known stays known, because no trace holds it.
        known = num_tokens if is_concrete(num_tokens) else None
        is_positive = known is not None and bool(known > 0)

        def evaluate(args: Tree, perturbations: Perturbations) -> Any:
            consts, inputs, n = args
            n = n if known is None else known
            inputs, arrays = [*inputs], dict[int, jax.Array]()
            for i, x in enumerate(perturbations):
                if x is not None:
                    inputs[i], arrays[i] = _parameter(i, inputs[i]), x
            given = LayerPerturbations(arrays, layered, None if is_positive else n)
            outputs = _evaluate(jaxpr, consts, inputs, given)
            loss_sum, (own, rest) = structure.unflatten(map(given.read, outputs))
            return loss_sum, (own if n is None else n, rest)

        args = consts, self.inputs, num_tokens if known is None else None
        return PerturbedLoss(evaluate, args, consumers)


def _parameter(leaf: int, value: Leaf) -> Parameter:
    return Parameter(value, leaf, tuple(range(jnp.ndim(value))))


def _evaluate(
    traced: Trace,
    consts: Sequence[Leaf],
    inputs: Sequence[Leaf | Parameter],
    perturbations: LayerPerturbations,
) -> list[Leaf | Parameter]:
    """The outputs of a traced function."""
    jaxpr = as_jaxpr(traced)
    constants = zip(jaxpr.constvars, map(as_array, consts), strict=True)
    values: dict[Atom, Leaf] = dict(constants)
    values |= zip(jaxpr.invars, inputs, strict=True)
    differentiable: dict[Atom, Leaf] = {}
    waiting: list[JaxprEqn] = []  # for what needs their outputs

    def read(x: Atom) -> Leaf | Parameter:
        return x.val if isinstance(x, Literal) else values[x]

    def is_parameter(x: Atom) -> bool:
        return not isinstance(x, Literal) and isinstance(values.get(x), Parameter)

    def array(x: Atom) -> Leaf:
        if not is_parameter(x):
            return read(x)
        if x not in differentiable:
            differentiable[x] = perturbations.read(values[x])
        return differentiable[x]

    def is_sliced(eqn: JaxprEqn) -> bool:
        """Whether it slices a large parameter that a loop is given whole."""
        if not (perturbations.in_loop and is_slice(eqn)):
            return False
        if not is_parameter(eqn.invars[0]):
            return False
        x = values[eqn.invars[0]]
        # Over devices, a slice of a spread axis would gather it.
        return x.leaf not in perturbations.layered and num_devices(x.value) == 1

    def evaluate_waiting() -> None:
        values.update(evaluate_some(jaxpr, waiting, array))
        waiting.clear()

    for eqn in jaxpr.eqns:
        is_entered = _is_entered(eqn, [*map(is_parameter, eqn.invars)])
        if not (is_entered or is_sliced(eqn)):
            waiting.append(eqn)
            continue
        if subjaxprs(eqn) or is_slice(eqn):
            evaluate_waiting()
        given = [*map(read, eqn.invars)]
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            if is_scan(eqn):
                outputs = _scan(eqn, given, array, perturbations)
            elif is_remat(eqn):
                outputs = _remat(eqn, given, perturbations)
            elif is_call(eqn):
                [called] = subjaxprs(eqn)
                own = getattr(called, "consts", ())
                outputs = _evaluate(called, own, given, perturbations)
            elif is_slice(eqn):
                x, *starts = given
                shape = eqn.outvars[0].aval.shape
                outputs = [perturbations.read_slice(x, starts, shape)]
            else:
                [x] = given
                outputs = [replace(_moved(eqn, x), value=apply_to_value(eqn, x.value))]
        values.update(zip(eqn.outvars, outputs, strict=True))
    evaluate_waiting()
    return [*map(read, jaxpr.outvars)]


def _is_entered(eqn: JaxprEqn, are_parameters: list[bool]) -> bool:
    """Whether perturbations are handed on to what an operation does inside.

    A call in which nothing changes a parameter or goes over its layers is an operation
    like others: JAX then differentiates equal calls once.
    """
    if not any(are_parameters) or not (is_scan(eqn) or keeps_parameter(eqn)):
        return False
    if not is_call(eqn):
        return True
    [called] = map(as_jaxpr, subjaxprs(eqn))
    inside = [*itertools.compress(called.invars, are_parameters)]

    def are_inside(variables: Sequence[Atom]) -> list[bool]:
        return [any(x is y for y in inside) for x in variables]

    return any(are_inside(called.outvars)) or any(
        _is_entered(inner, are_inside(inner.invars)) for inner in called.eqns
    )


def _moved(eqn: JaxprEqn, x: Parameter) -> Parameter:
    return replace(x, axes=apply_to_axes(eqn, x.axes))


def _remat(
    eqn: JaxprEqn, given: list[Leaf | Parameter], perturbations: LayerPerturbations
) -> list[Leaf | Parameter]:
    [called] = subjaxprs(eqn)

    def call(given: list[Leaf], arrays: dict[int, jax.Array]) -> list[Leaf]:
        return _evaluate(called, (), given, perturbations._replace(arrays=arrays))

    run = jax.checkpoint(call, **remat_options(eqn))
    used = {x.leaf for x in given if isinstance(x, Parameter)}
    return run(given, {i: perturbations.arrays[i] for i in sorted(used)})


def _scan(
    eqn: JaxprEqn,
    given: list[Leaf | Parameter],
    array: Callable[[Atom], Leaf],
    perturbations: LayerPerturbations,
) -> list[Leaf]:
    [body] = subjaxprs(eqn)
    first, last = carry_of(eqn)
    known = _perturbed_inside(eqn, given)
    pairs = zip(known, eqn.invars, strict=True)
    inputs = [array(variable) if x is None else x for x, variable in pairs]
    fixed, carry, slices = inputs[:first], inputs[first:last], inputs[last:]
    shared, layers = (
        {x.leaf: perturbations.arrays[x.leaf] for x in some if isinstance(x, Parameter)}
        for some in (fixed, slices)
    )

    def of_layer(x: Leaf | Parameter) -> Leaf | Parameter:
        if not isinstance(x, Parameter):
            return x
        return replace(x, axes=tuple(axis - 1 for axis in x.axes[1:]))

    def iterate(carry: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
        elements, arrays = given
        own = perturbations._replace(arrays=shared | arrays, in_loop=True)
        inputs = [*fixed, *carry, *map(of_layer, elements)]
        outputs = _evaluate(body, getattr(body, "consts", ()), inputs, own)
        outputs = [*map(own.read, outputs)]
        return outputs[: len(carry)], outputs[len(carry) :]

    options = scan_options(eqn)
    carry, stacks = jax.lax.scan(iterate, carry, (slices, layers), **options)
    return [*carry, *stacks]


def _perturbed_inside(
    eqn: JaxprEqn, given: Sequence[Leaf | Parameter | None]
) -> list[Parameter | None]:
    """What a scan perturbs in its body: layers, and large parameters; else `None`."""
    first, _ = carry_of(eqn)
    found = [x if isinstance(x, Parameter) else None for x in given]
    is_layered = [x and _consumer(eqn, i, x) == FIRST_AXIS for i, x in enumerate(found)]
    pairs = zip(found, is_layered, strict=True)
    layered = {x.leaf for x, is_its_layer in pairs if x and is_its_layer}

    def is_inside(i: int, x: Parameter) -> bool:
        # JAX cannot add to one array both layer by layer and as a whole.
        is_constant = i < first and x.leaf not in layered
        return bool(is_layered[i] or (is_constant and jnp.size(x.value) >= LARGE))

    return [x if x and is_inside(i, x) else None for i, x in enumerate(found)]


def _consumers_of(
    traced: Trace, inputs: Sequence[Leaf | Parameter | None]
) -> tuple[Consumers, list[Parameter | None]]:
    """What reads each parameter, and the outputs that are parameters.

    The static twin of `_evaluate`. What reads a parameter inside of a call is the same
    whether the call is entered or not.
    """
    jaxpr, found = as_jaxpr(traced), defaultdict[int, set[int | str]](set)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    known = {x: value if isinstance(value, Parameter) else None for x, value in pairs}

    def read(x: Atom) -> Parameter | None:
        return None if isinstance(x, Literal) else known.get(x)

    for eqn in jaxpr.eqns:
        given = [*map(read, eqn.invars)]
        parameters = {i: x for i, x in enumerate(given) if x is not None}
        if stops_gradient(eqn):
            continue
        if parameters and is_scan(eqn):
            first, _ = carry_of(eqn)
            whole = _perturbed_inside(eqn, given)[:first]
            rest = [None] * (len(given) - first)
            inner, _ = _consumers_of(subjaxprs(eqn)[0], [*whole, *rest])
            for leaf, consumers in inner.items():
                found[leaf] |= {_in_loop(x) for x in consumers}
            shared = {i for i, x in enumerate(whole) if x is not None}
            parameters = {i: x for i, x in parameters.items() if i not in shared}
        if not parameters or not keeps_parameter(eqn):
            for i, x in parameters.items():
                found[x.leaf].add(_consumer(eqn, i, x))
            continue
        if called := subjaxprs(eqn):
            inner, outputs = _consumers_of(called[0], given)
            for leaf, consumers in inner.items():
                found[leaf] |= consumers
        else:
            outputs = [_moved(eqn, x) for x in parameters.values()]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return found, [*map(read, jaxpr.outvars)]


def _in_loop(consumer: int | str) -> int | str:
    is_kept = isinstance(consumer, int) or consumer == GIVEN_ALL
    return consumer if is_kept else IN_LOOP


def _consumer(eqn: JaxprEqn, position: int, x: Parameter) -> int | str:
    if not is_scan(eqn):
        return operation(eqn)
    if position < carry_of(eqn)[1]:
        return GIVEN_ALL
    options = scan_options(eqn)
    if options["length"] == 0:  # `with_refs` would take a slice of no layers
        return "scan over no layers"
    if options["unroll"] >= options["length"] > 1:
        return "unrolled scan"
    return x.axes[0]
