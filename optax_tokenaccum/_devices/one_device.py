"""How a step runs on one device: the methods that the modes over a mesh override."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.trees import Batch, Gradients, Params

# Returns a state, values that are the same on all devices, and values of each device,
# `layout.stacked` along the axis of the rows.
RowsFn = Callable[..., tuple[Any, Any, Any]]


class OneDevice:
    """Without a mesh, arrays stay where they are, and `jit` places the others."""

    data_axes: tuple[str, ...] = ()
    num_devices = 1
    leading_axes: tuple[int, ...] = ()  # of the sums, before those of the parameters

    def agree(self, batch: Batch, *numbers: Any) -> None:
        """Raises if the processes of the mesh disagree about the shapes of a batch."""

    def spread(self, batch: Batch, axis: int = 0, *, check_rows: bool = True) -> Any:
        """The batch with its rows, along `axis`, spread over the devices."""
        return batch

    def init(self, params: Params, init: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The parameters where they belong, and what `init` returns for them."""
        return params, init(params)

    def layout(self, shardings: Any = None) -> Layout:
        """The layout of the sums outside of `map_rows`."""
        return Layout()

    def map_rows(
        self, f: RowsFn, shardings: Any, opt_state: Any, rows: Any, *shared: Any
    ) -> tuple[Any, Any, Any]:
        """`f(layout, opt_state, batch, *shared)`, on the rows of every device.

        `shardings` are those of the parameters, where known. `rows` come from `spread`;
        every device gets all of `shared`. `opt_state` may be `None`.
        """
        return f(Layout(), opt_state, rows, *shared)

    def auto(self, f: RowsFn, shardings: Any, axis: int = 0) -> RowsFn:
        """`f`, with the compiler choosing shardings on an Explicit mesh too.

        `shardings` are those of the state that `f` returns, where known.
        """
        return f

    def check_layout(self, acc_grads: Gradients, params: Params) -> None:
        """Raises `ValueError` if the sums belong to another number of devices."""
        lead = self.leading_axes
        sums = trees.named_leaves(acc_grads)
        for (path, acc), p in zip(sums, jax.tree.leaves(params), strict=False):
            got, own = jnp.shape(acc), jnp.shape(p)
            if got != (*lead, *own) and own in (got, got[1:]):
                raise ValueError(
                    "The sums of the open window must be laid out for this step's "
                    f"devices: at {path} of acc_grads expected shape {(*lead, *own)}, "
                    f"got {got}. Take over the state of a run on others with "
                    "regroup_sums(state, step.init(params))."
                )
