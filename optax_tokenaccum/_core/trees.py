"""Trees of arrays and scalars: their dtypes, and errors that name a leaf."""

import functools
import math
from collections.abc import Callable, Iterable
from numbers import Complex
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.typing import ArrayLike

Tree = Any  # any pytree
Params = Tree
Gradients = Tree  # like the parameters
OptState = Tree
ModelState = Tree
Batch = Tree  # leaves [rows, ...]
Aux = Tree
Leaf = Any  # an array, traced or not, a NumPy array, a number, or a shape
DType = jax.typing.DTypeLike
TracedBool = bool | jax.Array
T = TypeVar("T")


def is_concrete(x: Leaf) -> bool:
    """Whether `x` is not traced."""
    return not isinstance(x, jax.core.Tracer)


def is_float(x: Leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_number(x: Leaf) -> bool:
    """Whether `x` is a number or an array of numbers, not of keys."""
    if hasattr(x, "dtype"):
        return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return isinstance(x, Complex)


def is_key(x: Leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


# In JAX, `fold_in(key, i)` is `split(key, n)[i]`. Without a number of the library's
# own, the noise of a loss would be that of an initialization from the same split key.
_OF_THE_LIBRARY = 0x746F6B6E


def fold_key(key: jax.Array, *numbers: ArrayLike) -> jax.Array:
    """A key for these numbers, which no `split` of `key` returns."""
    return functools.reduce(jax.random.fold_in, (_OF_THE_LIBRARY, *numbers), key)


def is_float0(x: Leaf) -> bool:
    """Whether `x` is the gradient of an integer, which has a shape but no values."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def sharding_of(x: Leaf) -> NamedSharding | None:
    """The sharding of an array over a mesh, if it is known."""
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    is_traced = isinstance(sharding.mesh, AbstractMesh)
    return None if is_traced and not is_explicit(sharding.mesh) else sharding


def num_devices(*arrays: jax.Array) -> int:
    """The devices over which the compiler may spread arrays, as far as is known."""

    def count(mesh: AbstractMesh | Mesh) -> int:
        axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        return math.prod(n for n, kind in axes if kind != AxisType.Manual)

    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return max(map(count, [*meshes, jax.sharding.get_abstract_mesh()]))


def is_explicit(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether the types of arrays on the mesh contain their shardings."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def zeros_of(like: Leaf) -> jax.Array | np.ndarray:
    """Zeros with the type of `like`, whose dtype may be float0."""
    if is_float0(like):
        return np.zeros(like.shape, like.dtype)
    return as_varying(jnp.zeros(like.shape, like.dtype), varying_axes(like))


def unshared_zeros(like: T, made: Tree = ()) -> T:
    """Zeros like arrays, that XLA fills each by itself, after `made`.

    Of a shared zero, XLA would fill one array and copy it; and it would unite it with
    the zeros that a loop of the backward pass begins with, and store these for as long
    (`token_accumulation` on an H200: 1.16 of the memory of `optax.MultiSteps`, not 1).
    """
    zeros = jax.tree.map(lambda x: np.zeros((), x.dtype), like)
    zeros, _ = jax.lax.optimization_barrier((zeros, made))
    return jax.tree.map(_filled, like, zeros)


# Called for each leaf, and traced and lowered once for each shape.
@jax.jit
def _filled(like: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.zeros_like(like) + value


def unshared_zero(dtype: DType, made: Tree) -> jax.Array:
    """A scalar zero that XLA does not unite with another, for the same reason."""
    zero, _ = jax.lax.optimization_barrier((np.zeros((), dtype), made))
    return zero


def zero_unless(keeps: TracedBool, x: jax.Array) -> jax.Array:
    """`x` if `keeps`, else zeros. Selected, not multiplied: 0 x NaN is NaN."""
    if is_concrete(keeps):
        return x if keeps else jnp.zeros_like(x)
    return jnp.where(keeps, x, unshared_zero(x.dtype, keeps))


def common_dtype(*dtypes: DType) -> DType:
    """The dtype that `dtypes` promote to, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def at_least_float32(dtype: DType) -> DType:
    """`dtype`, or float32 if `dtype` is narrower or an integer."""
    # 8-bit floats have no implicit promotion: compare bits.
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return jnp.dtype(dtype if is_wide else jnp.float32)


def are_wide(tree: Tree) -> bool:
    """Whether all leaves are float32 or wider."""
    return all(at_least_float32(x.dtype) == x.dtype for x in jax.tree.leaves(tree))


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor` in the dtype that both promote to, at least float32."""
    dtype = common_dtype(at_least_float32(x.dtype), divisor.dtype)
    return x.astype(dtype) / divisor.astype(dtype)


@jax.jit
def token_mean(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """`x / tokens`, divided as in `divide`; zeros without tokens, whatever `x`."""
    has_tokens = tokens > 0
    return jnp.where(has_tokens, divide(x, jnp.where(has_tokens, tokens, 1)), 0)


def cast_like(tree: Tree, like: T) -> T:
    """`tree` with the dtypes of `like`, strongly typed."""

    def cast(x: Leaf, y: Leaf) -> jax.Array:
        return jax.lax.convert_element_type(x, jnp.result_type(y))

    return jax.tree.map(cast, tree, like)


def varying_axes(x: Leaf) -> frozenset[str]:
    """The axes of a `shard_map` along which the type of `x` says that it may differ."""
    kind = x if hasattr(x, "shape") and not isinstance(x, jax.Array) else jax.typeof(x)
    marks = getattr(kind, "manual_axis_type", None)  # newer jax
    if marks is None:  # a shape may have none
        return getattr(kind, "vma", None) or frozenset()
    return marks.varying


def as_varying(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """`x` with a type that says that it may differ along `names` too."""
    names = tuple(name for name in sorted(names) if name not in varying_axes(x))
    if not names:
        return x
    is_new = hasattr(jax.lax, "pcast")  # not jax 0.8
    cast: Any = getattr(jax.lax, "pcast" if is_new else "pvary")
    return cast(x, names, to="varying") if is_new else cast(x, names)


def types_are_marked() -> bool:
    """Whether types say along which axes of a `shard_map` values differ."""
    names = jax.sharding.get_abstract_mesh().manual_axes
    return any(varying_axes(jax.lax.axis_index(name)) for name in names)


def as_returned(body: Callable[[T], T], carry: T) -> T:
    """The first carry of a loop, with the types that `body` returns."""
    if not types_are_marked():
        return carry
    return jax.tree.map(
        lambda x, y: as_varying(jnp.asarray(x), varying_axes(y)),
        carry,
        jax.eval_shape(body, carry),
    )


def named_leaves(tree: Tree) -> list[tuple[str, Leaf]]:
    """Every leaf of `tree` as `(path, leaf)`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path) or "the root", leaf) for path, leaf in leaves]


def nodes_of(kind: type[T] | tuple[type[T], ...], tree: Tree) -> list[T]:
    """The nodes of `tree` that are instances of `kind`, a class or several classes."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]


def check_arrays(tree: Tree, name: str) -> None:
    """Raises `TypeError`, naming the leaf, unless `tree` holds arrays and numbers."""
    if all(hasattr(x, "dtype") for x in jax.tree.leaves(tree)):  # nearly always
        return
    for path, x in named_leaves(tree):
        if not hasattr(x, "dtype") and not isinstance(x, Complex):
            raise TypeError(
                f"{name} must be a pytree of arrays: at {path} got a "
                f"{type(x).__name__}. Leave it out, or convert it."
            )


def leading_axis(tree: Tree, name: str) -> int:
    """The size of the leading axis that all leaves must share, at least 1."""
    check_arrays(tree, name)
    shapes = [(path, jnp.shape(leaf)) for path, leaf in named_leaves(tree)]
    if not shapes:
        raise ValueError(f"{name} must hold at least one array: got {tree!r}.")
    first, its_shape = shapes[0]
    for path, shape in shapes:
        if not shape or shape[0] == 0 or shape[0] != its_shape[0]:
            raise ValueError(
                f"The leaves of {name} must share a leading axis of at least 1: got "
                f"shape {its_shape} at {first} and {shape} at {path}."
            )
    return its_shape[0]


def check_same_tree(got: Tree, expected: Tree, rule: str) -> None:
    """Raises `ValueError`, naming the leaf, if the trees or their shapes differ."""
    leaves, structure = jax.tree.flatten(got)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    are_alike = [*map(jnp.shape, leaves)] == [*map(jnp.shape, expected_leaves)]
    if structure == expected_structure and are_alike:
        return
    shapes, expected_shapes = (
        {path: f"shape {jnp.shape(leaf)}" for path, leaf in named_leaves(tree)}
        for tree in (got, expected)
    )
    for path in sorted(shapes.keys() | expected_shapes.keys()):
        shape = shapes.get(path, "no leaf")
        expected_shape = expected_shapes.get(path, "no leaf")
        if shape != expected_shape:
            raise ValueError(
                f"{rule}: at {path} expected {expected_shape}, got {shape}."
            )
    raise ValueError(f"{rule}: expected {expected_structure}, got {structure}.")


def as_num_tokens(num_tokens: Leaf, dtype: DType) -> jax.Array:
    """The weight of a micro-batch as a scalar of `dtype`.

    A traced one is -1 if it is negative or not finite; a known one is checked.
    """
    if is_concrete(num_tokens):
        # Use NumPy: inside a trace, jnp would trace the comparison of a known array.
        with np.errstate(over="ignore", invalid="ignore"):
            number = as_real_scalar(num_tokens, "num_tokens", dtype, xp=np)
        if not (np.isfinite(number) and number >= 0):
            raise ValueError(f"num_tokens must be finite and >= 0: got {num_tokens}.")
        return number  # so that a number that is known stays so in a trace
    num_tokens = as_real_scalar(num_tokens, "num_tokens", dtype)
    is_usable = jnp.isfinite(num_tokens) & (num_tokens >= 0)
    return jax.lax.select(is_usable, num_tokens, jnp.full_like(num_tokens, -1))


def as_real_scalar(x: ArrayLike, name: str, dtype: DType, xp: Any = jnp) -> Any:
    x = float(x) if type(x) is int else x  # which may exceed JAX's integers
    is_array = is_number(x)
    given = jnp.result_type(x) if is_array else jnp.dtype(bool)
    is_real = jnp.issubdtype(given, jnp.integer) or jnp.issubdtype(given, jnp.floating)
    if not is_real or jnp.shape(x) != ():
        got = f"{given}{list(jnp.shape(x))}" if is_array else f"a {type(x).__name__}"
        raise (ValueError if is_real else TypeError)(
            f"{name} must be a real scalar, one number for the whole micro-batch such "
            f"as mask.sum(): got {got}."
        )
    return xp.asarray(x, dtype)
