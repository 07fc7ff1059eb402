"""What the steps share: states that are made and found again, and the update."""

import abc
import dataclasses
import functools
from collections.abc import Hashable
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import checks, donation, trees
from optax_tokenaccum._core.backward import zero_if
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._devices.mesh import Shardings, put, warn_of_whole_sums
from optax_tokenaccum._steps.micro_batch import Setup
from optax_tokenaccum._steps.program import MEMO, HostInfo, StateLayout, remember
from optax_tokenaccum._steps.state import ParamsT, StepMetrics, StepState, tag


@dataclasses.dataclass(eq=False, repr=False)
class Step(abc.ABC):
    """A step for a loss of parameters, for one micro-batch or for a whole window."""

    setup: Setup
    donate: bool
    _warned = False
    opt_state_type: ClassVar[type]  # of its states
    _layouts: dict[Hashable, StateLayout] = dataclasses.field(
        init=False, default_factory=dict
    )

    @abc.abstractmethod
    def __post_init__(self) -> None:
        """Makes the programs."""

    def __getstate__(self) -> dict[str, trees.Tree]:
        return self.__dict__ | {"_layouts": {}}

    def init(
        self, params: ParamsT, model_state: trees.ModelState = None
    ) -> StepState[ParamsT]:
        """Returns a state with copies of the arrays: the caller's are never donated.

        To restore a checkpoint, use `jax.eval_shape(step.init, params)` as the target;
        over several devices, use the state itself, which has shardings.

        Args:
          params: a pytree of arrays; integer arrays are never updated. If the step has
            a mesh, arrays on that mesh stay where they are, and other arrays are copied
            to all its devices. Or a pytree of `jax.ShapeDtypeStruct`, whose shardings
            may lie on devices that are not there (`jax.experimental.topologies`): the
            state is then made of shapes, with the shardings that arrays would have, for
            `lower`.
          model_state: if the step has `has_model_state=True`, a pytree of arrays that
            the loss changes; placed like `params`.

        Returns:
          A `StepState`.

        Raises:
          TypeError: a leaf is not an array; or `params` is an NNX model, and a variable
            is not an `nnx.Param` or is in two places; or there is a `model_state`
            without `has_model_state=True`, or the reverse.
          ValueError: an array is on a mesh other than the step's.
        """
        has_model_state = self.setup.loss.has_model_state
        if has_model_state != (model_state is not None):
            given = ", model_state" * has_model_state
            raise TypeError(f"has_model_state={has_model_state}: init(params{given}).")
        checks.check_params(params)
        leaves = jax.tree.leaves((params, model_state))
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        own = shapes_of if is_abstract else donation.copy_for_donation
        params = self.setup.devices.place(own(params))
        init = self._of_shapes if is_abstract else self._init
        if not self._warned:
            self._warned = warn_of_whole_sums(self.setup.devices, params)
        # Its own, because an optimizer may return an array that it keeps.
        opt_state = own(self.setup.devices.init(init, params))
        if model_state is not None:
            model_state = donation.canonicalize_state(params, own(model_state))
            model_state = self.setup.devices.place(model_state)
        state = StepState(params, opt_state, model_state)
        remember(state, HostInfo(self.layout_of(state), count=0))
        return state

    @abc.abstractmethod
    def _init(self, params: trees.Params) -> trees.OptState:
        """The `opt_state` of new parameters."""

    def _of_shapes(self, params: trees.Params) -> trees.OptState:
        place = donation.scalar_sharding(params)
        if not isinstance(place, NamedSharding):
            made = jax.eval_shape(self._init, params)
            return jax.tree.map(lambda x: put(x, x.sharding or place), made)
        mesh = place.mesh  # traced on an Explicit one, whose types tell where
        explicit = (AxisType.Explicit,) * len(mesh.axis_names)
        typed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=explicit)

        def on(mesh: Mesh | AbstractMesh, x: jax.ShapeDtypeStruct) -> trees.Leaf:
            return put(x, NamedSharding(mesh, x.sharding.spec if x.sharding else P()))

        like = jax.tree.map(functools.partial(on, typed), params)
        with jax.sharding.use_abstract_mesh(typed):
            made = jax.eval_shape(self._init, like)
        return jax.tree.map(functools.partial(on, mesh), made)

    def require(self, state: StepState) -> None:
        """Raises if this step cannot take the state."""
        has_model_state = self.setup.loss.has_model_state
        if not isinstance(state, StepState):
            raise TypeError(
                "The state must be the StepState that step.init or the last call "
                f"returned: got a {type(state).__name__}. Write state, metrics = step("
                "state, batch); take a checkpoint that was restored without a target "
                "over with reshard_state(state, step.init(params))."
            )
        if (state.model_state is not None) != has_model_state:
            raise TypeError(
                f"The state must be of a step with has_model_state={has_model_state}: "
                "got the state of another. Take its parts over into step.init(...)."
            )
        if not isinstance(state.opt_state, self.opt_state_type):
            got = type(state.opt_state).__name__
            raise TypeError(
                f"The opt_state must be a {self.opt_state_type.__name__}, because a "
                f"train step has sums and a window step none: got a {got}. Between "
                "windows, take gradient_step and inner_opt_state over into "
                "step.init(params).opt_state."
            )
        array = tag(state)  # every call donates it
        is_concrete = isinstance(array, jax.Array) and trees.is_concrete(array)
        if is_concrete and array.is_deleted():
            raise ValueError(
                "The state was given to an earlier call, which donated its buffers. Go "
                "on with the state that this call returned; if it failed while it ran, "
                "restore a checkpoint. donate=False keeps old states."
            )

    def lookup(self, state: StepState) -> HostInfo:
        """What is known of the state of a call, also if another step returned it."""
        known = MEMO.get(tag(state))
        if known is None:
            return HostInfo(self.layout_of(state))
        # The static part of a model, such as `train()`, may have changed.
        model = jax.tree.structure(state.model_state)
        if known.layout.step is not self or known.layout.model != model:
            return known._replace(layout=self.layout_of(state))
        return known

    def layout_of(self, state: StepState) -> StateLayout:
        leaves, structure = jax.tree.flatten(state)
        found = tuple(map(trees.sharding_of, leaves))
        shardings = found if any(x is not None for x in found) else None
        key = structure, shardings, all(map(trees.is_concrete, leaves))
        model = jax.tree.structure(state.model_state)
        return self._layouts.setdefault(key, StateLayout(self, *key, model))

    def _check_sums(self, sums: trees.Gradients, params: trees.Params) -> None:
        """Raises `ValueError` if the sums belong to a different number of devices."""
        leaves = jax.tree.leaves(params)
        for acc, p in zip(jax.tree.leaves(sums), leaves, strict=False):
            expected = (*self.setup.devices.device_axis, *p.shape)
            if acc.shape != expected and p.shape in (acc.shape, acc.shape[1:]):
                raise ValueError(
                    "The sums must be laid out for this step's devices: expected shape "
                    f"{expected} in grad_sums, got {acc.shape}. Write "
                    "reshard_state(state, step.init(params))."
                )

    def _metrics(self, opt_state: TokenAccumulationState) -> StepMetrics:
        """The metrics of an open window."""
        loss, num_tokens = self.setup.accumulation.window_so_far(opt_state)
        return StepMetrics(
            loss=loss,
            num_tokens=num_tokens,
            grad_norm=jnp.zeros_like(loss),
            updated=jnp.zeros((), jnp.bool_),
            skipped=jnp.zeros((), jnp.bool_),
            mini_step=opt_state.mini_step,
            gradient_step=opt_state.gradient_step,
        )

    def _update(
        self,
        params: trees.Params,
        opt_state: TokenAccumulationState,
        closes: trees.TracedBool,
        shardings: Shardings,
    ) -> tuple[trees.Params, TokenAccumulationState, StepMetrics]:
        """If the window `closes`, applies its update to the parameters."""
        accumulation, devices = self.setup.accumulation, self.setup.devices
        metrics = self._metrics(opt_state)

        def update(
            state: TokenAccumulationState, held: tuple[trees.Params, jax.Array]
        ) -> tuple[trees.Gradients, tuple[trees.Params, jax.Array], trees.OptState]:
            sums = devices.reduce_over_devices(state.grad_sums, shardings)
            whole, params = state._replace(grad_sums=sums), held[0]
            gradient, norm = accumulation.gradient_and_norm(whole, params)
            extra = {"value": metrics.loss, "num_tokens": metrics.num_tokens}
            updates, inner_state = accumulation.inner.update(
                gradient, state.inner_opt_state, params, **extra
            )
            params = jax.tree.map(_applied, params, updates)
            params = devices.constrain(params, shardings, like_sums=True)
            made = (params, norm), inner_state
            # Until the update has ended, their memory is free for what it computes.
            return trees.unshared_zeros(state.grad_sums, made), *made

        params = devices.constrain(params, shardings, like_sums=True)
        try:
            closed, (params, grad_norm) = accumulation.close(
                opt_state, closes, update, (params, metrics.grad_norm)
            )
        except TypeError as error:
            error.add_note(
                "A step gives its optimizer gradients, parameters, value, num_tokens. "
                "If it needs more, such as value_fn, use token_accumulation in a loop."
            )
            raise
        is_empty = closes & jnp.logical_not(closed.has_updated)
        closed = closed._replace(grad_sums=zero_if(is_empty, closed.grad_sums))
        # Gathered after the loop: 554 instead of 705 MB, and half the bytes.
        params = devices.constrain(params, shardings)
        metrics = metrics._replace(
            grad_norm=grad_norm,
            updated=closed.has_updated,
            mini_step=closed.mini_step,
            gradient_step=closed.gradient_step,
        )
        return params, closed, metrics


def _applied(param: jax.Array, update: jax.Array) -> trees.Leaf:
    """The parameter plus its update, which weight decay gives an integer too."""
    is_trained = jnp.issubdtype(param.dtype, jnp.inexact)
    return optax.apply_updates(param, update) if is_trained else param


def shapes_of(tree: trees.Tree) -> trees.Tree:
    """Shapes in the place of arrays, with a sharding where one was chosen."""

    def shape_of(x: trees.Leaf) -> jax.ShapeDtypeStruct:
        is_placed = getattr(x, "committed", hasattr(x, "sharding"))
        sharding = x.sharding if is_placed else None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(shape_of, tree)
