"""Looks into trees of arrays and states, with errors that name the leaf."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

# Pytrees of arrays. The user chooses their structure.
Params = Any  # parameters, where a user gives them; inside, `optax.Params`
Gradients = optax.Updates  # a tree like the parameters
OptState = optax.OptState
Batch = Any  # the batch argument of a loss; leaves [rows, ...]

# Like the parameters, of their shardings; `None` if these are not known.
ParamShardings = Any

DType = jax.typing.DTypeLike
TracedBool = bool | jax.Array

P = TypeVar("P")  # the tree of parameters
M = TypeVar("M")  # the tree of a model's state
T = TypeVar("T")


def is_concrete(x: Any) -> bool:
    """Whether `x` is not traced."""
    return not isinstance(x, jax.core.Tracer)


def is_array(x: Any) -> bool:
    """Whether `x` is an array with values, neither traced nor a shape."""
    return isinstance(x, jax.Array) and is_concrete(x)


def is_zero(x: ArrayLike | None) -> bool:
    """Whether `x` is known to be 0."""
    return is_concrete(x) and not np.any(np.asarray(x))


def varying_axes(x: ArrayLike | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The mesh axes along which the type of `x` says that it may differ."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    marks = getattr(kind, "manual_axis_type", None)  # newer jax
    if marks is None:  # a shape may have none
        return getattr(kind, "vma", None) or frozenset()
    return marks.varying


def as_varying(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """`x` with a type that says that it may differ along `names` too."""
    names = tuple(name for name in sorted(names) if name not in varying_axes(x))
    if not names:
        return x
    cast: Any = getattr(jax.lax, "pcast", None)
    if cast is None:  # jax 0.8
        return getattr(jax.lax, "pvary")(x, names)  # noqa: B009
    return cast(x, names, to="varying")


def auto_axes(x: ArrayLike) -> frozenset[str]:
    """The mesh axes over which the compiler may spread `x`."""
    mesh = jax.typeof(x).sharding.mesh
    names = (name for name, size in mesh.shape.items() if size > 1)
    return frozenset(names) - {*mesh.manual_axes}


def types_are_marked() -> bool:
    """Whether types say along which axes of a map values differ."""
    names = jax.sharding.get_abstract_mesh().manual_axes
    return any(varying_axes(jax.lax.axis_index(name)) for name in names)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf of `tree` as `(path, leaf)`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(name_of(path), leaf) for path, leaf in leaves]


def name_of(path: KeyPath) -> str:
    return jax.tree_util.keystr(path) or "the root"


def leading_axis(tree: Any, name: str) -> int:
    """The size of the leading axis that all leaves must share, at least 1."""
    shapes = [(path, jnp.shape(leaf)) for path, leaf in named_leaves(tree)]
    if not shapes:
        raise ValueError(f"{name} must hold at least one array: got {tree!r}.")
    for path, shape in shapes:
        if not shape or shape[0] == 0:
            raise ValueError(
                f"The leaves of {name} must have a leading axis of at least 1: got "
                f"shape {shape} at {path}."
            )
    first, (size, *_) = shapes[0]
    for path, shape in shapes:
        if shape[0] != size:
            raise ValueError(
                f"The leaves of {name} must have the same leading axis: got {size} at "
                f"{first} and {shape[0]} at {path}."
            )
    return size


def check_same_tree(got: T, expected: T, rule: str) -> None:
    """Raises `ValueError`, naming the leaf, if the trees or their shapes differ."""
    leaves, structure = jax.tree.flatten(got)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    are_alike = [*map(jnp.shape, leaves)] == [*map(jnp.shape, expected_leaves)]
    if structure == expected_structure and are_alike:
        return
    shapes, expected_shapes = (
        {path: jnp.shape(leaf) for path, leaf in named_leaves(tree)}
        for tree in (got, expected)
    )
    for path in sorted(shapes.keys() | expected_shapes.keys()):
        shape, expected_shape = shapes.get(path), expected_shapes.get(path)
        if shape != expected_shape:
            raise ValueError(
                f"{rule}: at {path} expected {_describe(expected_shape)}, got "
                f"{_describe(shape)}."
            )
    raise ValueError(
        f"{rule}: the leaves agree, their containers differ: expected "
        f"{expected_structure}, got {structure}."
    )


def _describe(shape: tuple[int, ...] | None) -> str:
    return "no leaf" if shape is None else f"shape {shape}"


def check_state(state: Any, kind: type, name: str = "The state") -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"{name} must be the {kind.__name__} that init or the last call returned: "
            f"got {type(state).__name__}. Restore a checkpoint into jax.eval_shape("
            "init, params); take a run of optax.MultiSteps over with "
            "from_multi_steps_state."
        )


def is_alive(tree: Any) -> bool:
    """Whether no leaf of `tree` was donated."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return not any(is_concrete(x) and x.is_deleted() for x in leaves)


def check_alive(tree: Any) -> None:
    """Raises `ValueError` if a leaf of `tree`, a part of a state, was donated."""
    if not is_alive(tree):
        raise ValueError(
            "The state must not have been given to an earlier call: its buffers were "
            "donated to that call and are gone. Continue with the state that it "
            "returned; if it failed while it ran, restore a checkpoint. Build the step "
            "with donate=False to keep old states."
        )
