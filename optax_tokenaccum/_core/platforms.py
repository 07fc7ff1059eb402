"""What differs between CPUs, GPUs and TPUs: the same values, in the least memory."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax

from optax_tokenaccum._core.trees import T

_known: ContextVar[str | None] = ContextVar("platform", default=None)


def by_platform(
    *args: object, default: Callable[..., T], **ways: Callable[..., T]
) -> T:
    """`ways[platform](*args)` on a platform that has a way of its own.

    Where the platform is not known while a program is traced, as in a user's own `jit`,
    all ways are traced, and JAX lowers one of them.
    """
    platform = _known.get()
    if platform is None:
        return jax.lax.platform_dependent(*args, default=default, **ways)
    return ways.get(platform, default)(*args)


@contextlib.contextmanager
def traced_for(platform: str | None) -> Iterator[None]:
    """What is traced inside the block runs on this platform; `None` if on any."""
    token = _known.set(platform)
    try:
        yield
    finally:
        _known.reset(token)


def together_on_a_tpu(tree: T) -> T:
    """The same values; a TPU has all of them before it computes anything of one."""
    return by_platform(
        tree, tpu=jax.lax.optimization_barrier, default=lambda tree: tree
    )
