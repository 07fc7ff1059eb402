"""A jitted function of a step's state that leaves every array where it was."""

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, Generic, ParamSpec

import jax
from jax.typing import ArrayLike

from optax_tokenaccum._core.loss import Output
from optax_tokenaccum._core.platforms import traced_for
from optax_tokenaccum._core.trees import T, is_concrete
from optax_tokenaccum._devices.shardings import platform_of, sharding_of
from optax_tokenaccum._steps.state import (
    AnyStepState,
    S,
    StepMetrics,
    completed,
    key_array,
    model_state_of,
)

Args = ParamSpec("Args")


@dataclass(eq=False, repr=False)
class Program(Generic[Args]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state. Otherwise the compiler would choose them, for example for a
    moment whose shape matches no parameter, and the next call would compile again.

    Donated arguments come first, in the order in which they are returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and pairing a parameter
    with a moment of its shape costs XLA a copy of both.

    Attributes:
      body: `body(shardings, donated, kept, *traced) -> Output(donated, metrics, aux)`,
        a pure function, where `shardings` are those of the parameters, or `None`.
      arguments: checks a state and the other arguments of a call, and returns the
        `traced` ones. The call and `lower` have its signature.
      split: `split(state) -> (donated, kept)`; by default all of it is donated.
        `donated` is a state with `None` for every part that does not change.
      after: is given the old and the new state of every call.
      auto: `Mode.auto`, which wraps the body.
      shardings: the cache that all programs of a step share.
      donate: whether `jit` donates the first argument.
      row_axis: the axis of the rows, along which the devices' `aux` are concatenated.
    """

    body: Callable[..., Output]
    arguments: Callable[Concatenate[AnyStepState, Args], tuple[Any, ...]]
    split: Callable[[AnyStepState], tuple[AnyStepState, Any]] = lambda x: (x, ())
    after: Callable[[AnyStepState, AnyStepState], None] = lambda old, new: None
    _: KW_ONLY
    auto: Callable[..., Callable[..., Output]]
    shardings: "ShardingCache"
    donate: bool
    row_axis: int = 0

    def __post_init__(self) -> None:
        self._jitted: dict[Hashable, jax.stages.Wrapped] = {}
        self._compiled: set[Hashable] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A jitted function that was pickled cannot be lowered.
        return self.__dict__ | {"_jitted": {}, "_compiled": set()}

    def __call__(
        self, state: S, *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[S, StepMetrics]:
        shardings, arguments = self._prepare(state, *args, **kwargs)
        donated, metrics, aux = self._at(state, shardings)(*arguments)
        new = completed(donated, state)
        self.after(state, new)
        self.shardings.remember(new, shardings)
        return new, metrics._replace(aux=aux)

    def lower(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> jax.stages.Lowered:
        shardings, arguments = self._prepare(state, *args, **kwargs)
        return self._at(state, shardings).lower(*arguments)

    def make_ready(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> None:
        """Compiles the program now, unless it is compiled for such a state already."""
        if not all(map(is_concrete, jax.tree.leaves(state))):
            return  # in a trace, where nothing is donated
        key = _signature(state)
        if key not in self._compiled:
            self.lower(state, *args, **kwargs).compile()
            self._compiled.add(key)

    def _prepare(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> "tuple[StateShardings | None, tuple[Any, ...]]":
        """The shardings of a state, and the arguments of the jitted function."""
        traced = self.arguments(state, *args, **kwargs)
        return self.shardings.of(state), (*self.split(state), *traced)

    def _at(
        self, state: AnyStepState, shardings: "StateShardings | None"
    ) -> jax.stages.Wrapped:
        """The jitted function for states on this platform with these shardings."""
        place = platform, _ = platform_of(key_array(state)), shardings
        if place in self._jitted:
            return self._jitted[place]
        params = out = known = None
        if shardings is not None:
            params, (out, _) = shardings.state.params, self.split(shardings.state)
            if shardings.is_concrete:
                known = Output(jax.tree.map(lambda s: s or None, out), None, None)
        body = functools.partial(self._traced, platform, params)
        jitted = jax.jit(
            self.auto(body, out, self.row_axis),
            donate_argnums=0 if self.donate else (),
            out_shardings=known,
        )
        return self._jitted.setdefault(place, jitted)

    def _traced(self, platform: str | None, *args: Any) -> Output:
        with traced_for(platform):
            return self.body(*args)


def _signature(tree: T) -> Hashable:
    """The properties of `tree` that decide whether `jit` has to compile."""
    leaves, structure = jax.tree.flatten(tree)
    placed = (x.sharding if getattr(x, "committed", False) else None for x in leaves)
    return structure, (*map(jax.typeof, leaves),), (*placed,)


@dataclass(frozen=True, eq=False)
class StateShardings:
    """The shardings of a state over several devices."""

    state: AnyStepState  # of shardings; `UNKNOWN` where the compiler may choose
    is_concrete: bool


class ShardingCache:
    """The shardings of a step's states, one object for each, so that `is` compares."""

    def __init__(self) -> None:
        self._memo: ArrayMemo[StateShardings] = ArrayMemo()
        self._known: dict[Hashable, StateShardings] = {}

    def of(self, state: AnyStepState) -> StateShardings | None:
        """The shardings of a state; `None` on a single device."""
        key = key_array(state)
        if isinstance(key, jax.Array) and is_concrete(key):
            if key.sharding.num_devices == 1:
                return None
            known = self._memo.get(key)
            # The static part of a model, such as `train()`, may have changed.
            model = jax.tree.structure(model_state_of(state))
            if known and model == jax.tree.structure(model_state_of(known.state)):
                return known
        leaves, structure = jax.tree.flatten(state)
        shardings = tuple(map(sharding_of, leaves))
        if not any(shardings):
            return None
        made = structure, shardings, is_concrete(key)
        of_state = StateShardings(structure.unflatten(shardings), is_concrete(key))
        return self._known.setdefault(made, of_state)

    def remember(self, state: AnyStepState, shardings: StateShardings | None) -> None:
        if shardings is not None:
            self._memo.remember(key_array(state), shardings)


class ArrayMemo(Generic[T]):
    """Stores a value for each array, by identity, with a weak reference to the array.

    An attribute of the step object would be wrong as soon as a caller returns to an
    older state, or trains two states with one step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[jax.Array], T]] = {}

    def __reduce__(self) -> tuple[type["ArrayMemo[T]"], tuple[()]]:
        return type(self), ()  # pickled empty: array identities do not survive

    def get(self, array: ArrayLike | None) -> T | None:
        known = self._known.get(id(array))
        return known[1] if known is not None and known[0]() is array else None

    def remember(self, array: ArrayLike | None, value: T) -> None:
        if not isinstance(array, jax.Array) or not is_concrete(array):
            return
        key = id(array)
        ref = weakref.ref(array, lambda _: self._known.pop(key, None))
        self._known[key] = (ref, value)
