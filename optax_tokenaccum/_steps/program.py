"""A jitted function of a step's state that leaves every array where it was."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec

import jax

from optax_tokenaccum._core.loss import Output
from optax_tokenaccum._core.trees import (
    T,
    is_concrete,
)
from optax_tokenaccum._devices.shardings import sharding_of
from optax_tokenaccum._steps.compile_ahead import Lowering, signature
from optax_tokenaccum._steps.state import (
    AnyStepState,
    StepMetrics,
    key_array,
    model_state_of,
)

Args = ParamSpec("Args")


class Program(Generic[Args]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state. Otherwise the compiler would choose them, for example for a
    moment whose shape matches no parameter, and the next call would compile again.

    Donated arguments come first, in the order in which they are returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and pairing a parameter
    with a moment of its shape costs XLA a copy of both.

    Args:
      body: `body(shardings, donated, kept, *traced) -> Output(donated, metrics, aux)`,
        a pure function, where `shardings` are those of the parameters, or `None`.
      arguments: checks a state and the other arguments of a call, and returns the
        `traced` ones. The call and `lower` have its signature.
      split: `split(state) -> (donated, kept)`; by default all of it is donated.
      join: `join(donated, old_state) -> state`, where `donated` is from the body.
      auto: `Mode.auto`, which wraps the body.
      shardings: the cache that all programs of a step share.
      donate: whether `jit` donates the first argument.
      agree: takes the arguments of a call besides the state, before they are checked;
        raises if they are not the same in all processes.
      row_axis: the axis of the rows, along which the devices' `aux` are concatenated.
    """

    def __init__(
        self,
        body: Callable[..., Output],
        arguments: Callable[Concatenate[AnyStepState, Args], tuple[Any, ...]],
        split: Callable[[AnyStepState], tuple[Any, Any]] = lambda state: (state, ()),
        join: Callable[[Any, AnyStepState], Any] = lambda state, _: state,
        *,
        auto: Callable[..., Callable[..., Output]],
        shardings: "ShardingCache",
        donate: bool,
        agree: Callable[Args, None] | None = None,
        row_axis: int = 0,
    ):
        self._body = body
        self._arguments = arguments
        self._split = split
        self._join = join
        self._auto = auto
        self._shardings = shardings
        self._donate = donate
        self._agree = agree
        self._row_axis = row_axis
        self._jitted: dict[StateShardings | None, Any] = {}
        self._compiled: set[Any] = set()
        self._is_ready: ArrayMemo[bool] = ArrayMemo()

    def __getstate__(self) -> dict[str, Any]:
        # A jitted function that was pickled cannot be lowered.
        return self.__dict__ | {"_jitted": {}, "_compiled": set()}

    def __call__(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Any, StepMetrics]:
        if self._agree is not None:  # before an error that others would wait for
            self._agree(*args, **kwargs)
        shardings, arguments = self._prepare(state, *args, **kwargs)
        donated, metrics, aux = self._at(shardings)(*arguments)
        state = self._join(donated, state)
        self._shardings.remember(state, shardings)
        return state, metrics._replace(aux=aux)

    def lower(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> jax.stages.Lowered:
        return self.lowering(state, *args, **kwargs).lowered

    def lowering(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> Lowering:
        shardings, arguments = self._prepare(state, *args, **kwargs)
        return Lowering(self._at(shardings).lower(*arguments), arguments)

    def make_ready(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> None:
        """Compiles the program now, unless it is compiled for such a state already."""
        if self._is_ready.get(key_array(state)):
            return
        if not all(map(is_concrete, jax.tree.leaves(state))):
            return  # in a trace, where nothing is donated
        shardings, arguments = self._prepare(state, *args, **kwargs)
        key = shardings, signature(arguments)
        if key not in self._compiled:
            self._at(shardings).lower(*arguments).compile()
            self._compiled.add(key)

    def stay_ready(self, state: AnyStepState) -> None:
        self._is_ready.remember(key_array(state), True)

    def _prepare(
        self, state: AnyStepState, *args: Args.args, **kwargs: Args.kwargs
    ) -> "tuple[StateShardings | None, tuple[Any, ...]]":
        """The shardings of a state, and the arguments of the jitted function."""
        traced = self._arguments(state, *args, **kwargs)
        return self._shardings.of(state), (*self._split(state), *traced)

    def _at(self, shardings: "StateShardings | None") -> Any:
        """The jitted function for a state with these shardings."""
        if shardings in self._jitted:
            return self._jitted[shardings]
        params = out = None
        if shardings is not None:
            params, (out, _) = shardings.state.params, self._split(shardings.state)
        body = functools.partial(self._body, params)
        options: dict[str, Any] = {"donate_argnums": 0} if self._donate else {}
        if shardings is not None and shardings.is_concrete:
            known = jax.tree.map(lambda s: s or None, out)
            options["out_shardings"] = Output(known, None, None)
        jitted = jax.jit(self._auto(body, out, self._row_axis), **options)
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

    def of(self, state: AnyStepState) -> StateShardings | None:
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

    def remember(self, state: AnyStepState, shardings: StateShardings | None) -> None:
        if shardings is not None:
            self._memo.remember(key_array(state), shardings)


def _are_of_one_model(shardings: AnyStepState, state: AnyStepState) -> bool:
    """Whether the static part of a model, such as `train()`, is still the same."""
    known, given = map(model_state_of, (shardings, state))
    return jax.tree.structure(known) == jax.tree.structure(given)


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
