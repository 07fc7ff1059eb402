"""What the host knows of a counter that lives on the device."""

import weakref
from typing import Any

import jax

from optax_tokenaccum._checks import is_concrete


class MiniStepMemo:
    """Remembers the value of `mini_step` arrays, so that no step waits for the device.

    The key is the identity of the array, held weakly. A number kept on the step object
    instead would be wrong as soon as a caller goes back to an older state, or trains
    two states with one step. An array never seen before, after a restore, is read once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def get(self, mini_step: Any) -> int | None:
        known = self._known.get(id(mini_step))
        return known[1] if known is not None and known[0]() is mini_step else None

    def read(self, mini_step: Any) -> int:
        value = self.get(mini_step)
        if value is None:
            value = int(mini_step)
            self.remember(mini_step, value)
        return value

    def remember(self, mini_step: Any, value: int) -> None:
        if not isinstance(mini_step, jax.Array) or not is_concrete(mini_step):
            return
        key = id(mini_step)
        ref = weakref.ref(mini_step, lambda _: self._known.pop(key, None))
        self._known[key] = (ref, value)
