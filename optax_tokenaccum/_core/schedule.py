"""Schedules that decide when a window closes."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._core.trees import TracedBool, is_concrete

# A number, or a function from `gradient_step` to a number.
CountSchedule = int | Callable[[jax.Array], ArrayLike]

_INT32_MAX = 2**31 - 1  # `mini_step` is int32; sys.maxsize means never


@dataclass(frozen=True)
class Schedule:
    """The rule that closes a window; at most one field is set."""

    every_k: CountSchedule | None
    every_n_tokens: CountSchedule | None

    @property
    def is_set(self) -> bool:
        return self.every_k is not None or self.every_n_tokens is not None

    def closes(
        self,
        mini_step: jax.Array,
        tokens: jax.Array,
        gradient_step: jax.Array,
        close_window: TracedBool | None = None,
    ) -> bool | jax.Array:
        """Whether the window, including its newest micro-batch, closes now.

        `tokens` are those of the window, read only if `mini_step > 0`. The result is a
        Python bool only if no schedule is set and `close_window` is `False`.
        """
        asked = _as_flag(close_window)
        if self.every_k is not None:
            k = _count_at(self.every_k, gradient_step, "every_k_schedule")
            due = mini_step >= (min(k, _INT32_MAX) if isinstance(k, int) else k)
        elif self.every_n_tokens is not None:
            n = _count_at(self.every_n_tokens, gradient_step, "every_n_tokens")
            due = tokens >= (float(n) if isinstance(n, int) else n)
        elif asked is None:
            raise ValueError(
                "A window needs a rule that closes it: got neither every_k_schedule "
                "nor every_n_tokens nor close_window. Give one of the first two to the "
                "constructor, or close_window=True or False to every update."
            )
        else:
            due = False
        if asked is not None:
            due = due | asked
        return due if due is False else due & (mini_step > 0)


def make_schedule(
    every_k_schedule: CountSchedule | None = None,
    every_n_tokens: CountSchedule | None = None,
) -> Schedule:
    if every_k_schedule is not None and every_n_tokens is not None:
        raise ValueError(
            "At most one schedule may close a window: got every_k_schedule="
            f"{every_k_schedule!r} and every_n_tokens={every_n_tokens!r}. Drop one."
        )
    return Schedule(
        _as_count_schedule(every_k_schedule, "every_k_schedule"),
        _as_count_schedule(every_n_tokens, "every_n_tokens"),
    )


def _as_count_schedule(value: CountSchedule | None, name: str) -> CountSchedule | None:
    if value is None or callable(value):
        return value
    return as_count(value, name, otherwise=" or a function of gradient_step")


def _count_at(
    schedule: CountSchedule, gradient_step: jax.Array, name: str
) -> ArrayLike:
    if not callable(schedule):
        return schedule
    count = schedule(gradient_step)
    if jnp.shape(count) != ():
        raise ValueError(
            f"The function given as {name} must return a scalar: got shape "
            f"{jnp.shape(count)}."
        )
    if is_concrete(count) and not np.asarray(count) >= 1:
        at = f" at gradient_step {gradient_step}" if is_concrete(gradient_step) else ""
        raise ValueError(
            f"The function given as {name} must return at least 1: got {count}{at}."
        )
    return count


def _as_flag(close_window: TracedBool | None) -> TracedBool | None:
    if close_window is None or isinstance(close_window, bool):
        return close_window
    dtype = getattr(close_window, "dtype", None)
    if dtype != jnp.bool_ or jnp.shape(close_window) != ():
        raise TypeError(
            "close_window must be a Python bool or a bool scalar array: got "
            f"{close_window!r}."
        )
    return jnp.asarray(close_window)
