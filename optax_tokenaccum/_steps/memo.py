"""Caches of what the host knows about arrays on devices."""

import weakref
from typing import Any, Generic, TypeVar

import jax

from optax_tokenaccum._core.trees import is_concrete

T = TypeVar("T")


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


class MiniStepMemo(ArrayMemo[int]):
    """The values of `mini_step` arrays, so that steps do not wait for the device.

    A new array, for example after a restore, is read once.
    """

    def read(self, mini_step: Any) -> int:
        value = self.get(mini_step)
        if value is None:
            value = int(mini_step)
            self.remember(mini_step, value)
        return value
