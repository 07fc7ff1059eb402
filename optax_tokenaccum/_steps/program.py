"""A jitted function of a step's state that leaves every array where it was."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from optax_tokenaccum._core.trees import is_concrete
from optax_tokenaccum._devices.one_device import OneDevice
from optax_tokenaccum._devices.shardings import sharding_of
from optax_tokenaccum._steps.compile_ahead import Lowering, signature
from optax_tokenaccum._steps.state import (
    StepMetrics,
    StepState,
    key_array,
    variables_of,
)

P = ParamSpec("P")
T = TypeVar("T")


class Arguments(NamedTuple):
    """The arguments of a call besides the state."""

    traced: tuple[Any, ...] = ()  # by `jit`, in the order of the body's parameters
    loss_kwargs: dict[str, Any] | None = None  # `None` if the body takes none


class Program(Generic[P]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state. Otherwise the compiler would choose them, for example for a
    moment whose shape matches no parameter, and the next call would compile again.

    Donated arguments come first, in the order in which they are returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and pairing a parameter
    with a moment of its shape costs XLA a copy of both.

    Args:
      body: `body(shardings, donated, kept, *traced) -> (donated, metrics, aux)`, a pure
        function, where `shardings` are those of the parameters, or `None`. If the loss
        takes keywords, their arrays follow `traced`, and `static` is the rest of them.
      arguments: checks a state and the other arguments of a call, and returns
        `Arguments`. The call and `lower` have its signature.
      split: `split(state) -> (donated, kept)`; by default all of it is donated.
      join: `join(donated, old_state) -> state`, where `donated` is from the body.
      mode: how the step runs on its devices.
      shardings: the cache that all programs of a step share.
      donate: whether `jit` donates the first argument.
      shared: returns those arguments of a call that must be the same in all processes,
        see `OneDevice.agree`.
      row_axis: the axis of the rows, along which the devices' `aux` are concatenated.
    """

    def __init__(
        self,
        body: Callable[..., tuple[Any, StepMetrics, Any]],
        arguments: Callable[Concatenate[StepState, P], Arguments],
        split: Callable[[StepState], tuple[Any, Any]] = lambda state: (state, ()),
        join: Callable[[Any, StepState], StepState] = lambda state, _: state,
        *,
        mode: OneDevice,
        shardings: "ShardingCache",
        donate: bool,
        shared: Callable[P, tuple[Any, ...]] | None = None,
        row_axis: int = 0,
    ):
        self._body = body
        self._arguments = arguments
        self._split = split
        self._join = join
        self._mode = mode
        self._shardings = shardings
        self._donate = donate
        self._shared = shared
        self._row_axis = row_axis
        self._jitted: dict[StateShardings | None, Any] = {}
        self._compiled: set[Any] = set()
        self._is_ready: ArrayMemo[bool] = ArrayMemo()

    def __getstate__(self) -> dict[str, Any]:
        # A jitted function that was pickled cannot be lowered.
        return self.__dict__ | {"_jitted": {}, "_compiled": set()}

    def __call__(
        self, state: StepState, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[StepState, StepMetrics]:
        if self._shared is not None:  # before an error that others would wait for
            self._mode.agree(*self._shared(*args, **kwargs))
        shardings, arguments, static = self._prepare(state, *args, **kwargs)
        donated, metrics, aux = self._at(shardings)(*arguments, static=static)
        state = self._join(donated, state)
        self._shardings.remember(state, shardings)
        return state, metrics._replace(aux=aux)

    def lower(
        self, state: StepState, *args: P.args, **kwargs: P.kwargs
    ) -> jax.stages.Lowered:
        return self.lowering(state, *args, **kwargs).lowered

    def lowering(self, state: StepState, *args: P.args, **kwargs: P.kwargs) -> Lowering:
        shardings, arguments, static = self._prepare(state, *args, **kwargs)
        lowered = self._at(shardings).lower(*arguments, static=static)
        return Lowering(lowered, arguments)

    def make_ready(self, state: StepState, *args: P.args, **kwargs: P.kwargs) -> None:
        """Compiles the program now, unless it is compiled for such a state already."""
        if self._is_ready.get(key_array(state)):
            return
        if not all(map(is_concrete, jax.tree.leaves(state))):
            return  # in a trace, where nothing is donated
        shardings, arguments, static = self._prepare(state, *args, **kwargs)
        key = shardings, signature(arguments), static
        if key not in self._compiled:
            self._at(shardings).lower(*arguments, static=static).compile()
            self._compiled.add(key)

    def stay_ready(self, state: StepState) -> None:
        self._is_ready.remember(key_array(state), True)

    def _prepare(self, state: StepState, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shardings of a state, and the arguments of the jitted function."""
        traced, loss_kwargs = self._arguments(state, *args, **kwargs)
        static = None
        if loss_kwargs is not None:
            arrays, static = split_arrays(loss_kwargs)
            traced = (*traced, arrays)
        return self._shardings.of(state), (*self._split(state), *traced), static

    def _at(self, shardings: "StateShardings | None") -> Any:
        """The jitted function for a state with these shardings."""
        if shardings in self._jitted:
            return self._jitted[shardings]
        params = out = None
        if shardings is not None:
            params, (out, _) = shardings.state.params, self._split(shardings.state)

        def program(*arguments: Any, static: StaticPart | None) -> Any:
            keywords = {} if static is None else {"static": static}
            body = functools.partial(self._body, params, **keywords)
            return self._mode.auto(body, out, self._row_axis)(*arguments)

        options: dict[str, Any] = {"donate_argnums": 0} if self._donate else {}
        if shardings is not None and shardings.is_concrete:
            known = jax.tree.map(lambda s: s or None, out)
            options["out_shardings"] = (known, None, None)
        jitted = jax.jit(program, static_argnames="static", **options)
        return self._jitted.setdefault(shardings, jitted)


class StateShardings:
    """The shardings of a state over several devices."""

    def __init__(self, structure: Any, shardings: tuple[Any, ...], is_concrete: bool):
        # A tree like the state; `UNKNOWN` where the compiler may choose.
        self.state = jax.tree.unflatten(structure, shardings)
        self.is_concrete = is_concrete


class ShardingCache:
    """The shardings of a step's states, one object for each, so that `is` compares."""

    def __init__(self) -> None:
        self._memo: ArrayMemo[StateShardings] = ArrayMemo()
        self._known: dict[Any, StateShardings] = {}

    def of(self, state: StepState) -> StateShardings | None:
        """The shardings of a state; `None` on a single device."""
        key = key_array(state)
        if isinstance(key, jax.Array) and is_concrete(key):
            if key.sharding.num_devices == 1:
                return None
            known = self._memo.get(key)
            if known is not None and _are_of_one_model(known.state, state):
                return known
        leaves, structure = jax.tree.flatten(state)
        shardings = tuple(map(sharding_of, leaves))
        if not any(shardings):
            return None
        made = structure, shardings, is_concrete(key)
        return self._known.setdefault(made, StateShardings(*made))

    def remember(self, state: StepState, shardings: StateShardings | None) -> None:
        if shardings is not None:
            self._memo.remember(key_array(state), shardings)


def _are_of_one_model(shardings: Any, state: StepState) -> bool:
    """Whether the static part of a model, such as `train()`, is still the same."""
    return variables_of(shardings).model is variables_of(state).model


class ArrayMemo(Generic[T]):
    """Stores a value for each array, by identity, with a weak reference to the array.

    An attribute of the step object would be wrong as soon as a caller returns to an
    older state, or trains two states with one step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()  # pickled empty: array identities do not survive

    def get(self, array: Any) -> T | None:
        known = self._known.get(id(array))
        return known[1] if known is not None and known[0]() is array else None

    def remember(self, array: Any, value: T) -> None:
        if not isinstance(array, jax.Array) or not is_concrete(array):
            return
        key = id(array)
        ref = weakref.ref(array, lambda _: self._known.pop(key, None))
        self._known[key] = (ref, value)


class StaticPart(NamedTuple):
    """A tree without its arrays; hashable, so that `jit` can compare it."""

    structure: Any
    leaves: tuple[Any, ...]


def split_arrays(tree: Any) -> tuple[list[Any], StaticPart]:
    """Splits `tree` into arrays and numbers, and bools, strings and functions."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if _is_array(x)]
    rest = tuple(_IsArray if _is_array(x) else x for x in leaves)
    return arrays, StaticPart(structure, rest)


def join_arrays(arrays: list[Any], static: StaticPart) -> Any:
    """The inverse of `split_arrays`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if x is _IsArray else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


class _IsArray:
    """Marks the position of an array among the leaves."""


def _is_array(x: Any) -> bool:
    numbers = np.ndarray, np.generic, int, float, complex
    is_number = isinstance(x, numbers) and not isinstance(x, bool | np.character)
    return is_number or isinstance(x, jax.Array | jax.ShapeDtypeStruct)
