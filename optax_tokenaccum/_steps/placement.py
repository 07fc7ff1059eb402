"""Where the arrays of a state are, so that a step leaves them there."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from optax_tokenaccum._core.trees import is_concrete
from optax_tokenaccum._devices.shardings import sharding_of
from optax_tokenaccum._steps.memo import ArrayMemo


class Placement:
    """The shardings of a state over several devices.

    Without them the compiler places what a step returns as it sees fit, a moment that
    is no parameter's size for one, and the next call compiles once more.

    Attributes:
      shardings: the tree of the state; `None` where the compiler may choose.
      is_concrete: whether the state is there, and not traced.
    """

    def __init__(self, structure: Any, shardings: tuple[Any, ...], is_concrete: bool):
        self.shardings = jax.tree.unflatten(structure, shardings)
        self.is_concrete = is_concrete


class Placements:
    """The placements that a step has met; one of each, so that `is` compares them."""

    def __init__(self) -> None:
        self._memo: ArrayMemo[Placement] = ArrayMemo()
        self._met: dict[Any, Placement] = {}

    def of(self, state: Any, tell_tale: Any) -> Placement | None:
        """The placement of a state; `None` on a single device.

        Args:
          state: what a step is given.
          tell_tale: an array of it. One that a step has returned is known already.
        """
        if isinstance(tell_tale, jax.Array) and is_concrete(tell_tale):
            if tell_tale.sharding.num_devices == 1:
                return None
            known = self._memo.get(tell_tale)
            if known is not None:
                return known
        leaves, structure = jax.tree.flatten(state)
        shardings = tuple(map(sharding_of, leaves))
        if not any(shardings):
            return None
        key = structure, shardings, is_concrete(tell_tale)
        return self._met.setdefault(key, Placement(*key))

    def remember(self, tell_tale: Any, placement: Placement | None) -> None:
        if placement is not None:
            self._memo.remember(tell_tale, placement)


class PlacedJit:
    """A jitted program that returns a state where it was.

    Args:
      program: a function of a placement and of arguments; it returns a state, or a
        part of one, and metrics.
      returned: of the state's shardings, those of what is returned of it.
      wrap: called on a program and on the shardings of the state that it returns.
      donate: whether the first argument's buffers are taken for what is returned.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        returned: Callable[[Any], Any],
        wrap: Callable[..., Any],
        donate: bool,
    ):
        self._program = program
        self._returned = returned
        self._wrap = wrap
        self._donate = donate
        self._jitted: dict[Placement | None, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A jitted function that was pickled cannot be lowered.
        return self.__dict__ | {"_jitted": {}}

    def at(self, placement: Placement | None) -> Any:
        """The jitted function of the arguments alone."""
        if placement in self._jitted:
            return self._jitted[placement]
        out = None if placement is None else self._returned(placement.shardings)

        def program(*args: Any, **static: Any) -> Any:
            run = functools.partial(self._program, placement, **static)
            return self._wrap(run, out)(*args)

        options: dict[str, Any] = {"donate_argnums": 0} if self._donate else {}
        if placement is not None and placement.is_concrete:
            options["out_shardings"] = (out, None)
        jitted = jax.jit(program, static_argnames="static", **options)
        return self._jitted.setdefault(placement, jitted)


def as_it_is(program: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """A `wrap` that does nothing."""
    return program
