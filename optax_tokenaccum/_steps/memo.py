"""What the host knows of arrays that live on devices."""

import weakref
from typing import Any, Generic, TypeVar

import jax

from optax_tokenaccum._core.trees import is_concrete

T = TypeVar("T")


class ArrayMemo(Generic[T]):
    """Remembers something of each array, by the array's identity, held weakly.

    What is kept on the step object instead would be wrong as soon as a caller goes back
    to an older state, or trains two states with one step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()  # a pickled step forgets: arrays are others elsewhere

    def get(self, array: Any) -> T | None:
        known = self._known.get(id(array))
        return known[1] if known is not None and known[0]() is array else None

    def remember(self, array: Any, value: T) -> None:
        if not isinstance(array, jax.Array) or not is_concrete(array):
            return
        key = id(array)
        ref = weakref.ref(array, lambda _: self._known.pop(key, None))
        self._known[key] = (ref, value)


class MiniStepMemo(ArrayMemo[int]):
    """The values of `mini_step` arrays, so that no step waits for the device.

    An array never seen before, after a restore, is read once.
    """

    def read(self, mini_step: Any) -> int:
        value = self.get(mini_step)
        if value is None:
            value = int(mini_step)
            self.remember(mini_step, value)
        return value
