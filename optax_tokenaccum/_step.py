"""What the steps share: programs that leave arrays in place, and the update."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef

from optax_tokenaccum._accumulation import Accumulation
from optax_tokenaccum._checks import check_inner_state, check_nnx_variables
from optax_tokenaccum._devices import (
    Devices,
    Shardings,
    auto,
    put,
    warn_of_whole_sums,
)
from optax_tokenaccum._loss import Loss
from optax_tokenaccum._state import (
    AnyStepState,
    ArrayMemo,
    ModelStepState,
    S,
    StepMetrics,
    StepState,
    TokenAccumulationState,
    apart,
    completed,
    home,
    key_array,
    model_state_of,
    owned,
    require_step_state,
    stable,
)
from optax_tokenaccum._trees import (
    Aux,
    Gradients,
    Leaf,
    ModelState,
    OptState,
    Params,
    TracedBool,
    Tree,
    is_concrete,
    sharding_of,
)

StepT = TypeVar("StepT", bound="Step")


class Program(abc.ABC, Generic[StepT]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state. Otherwise the compiler would choose them, for example for a
    moment whose shape matches no parameter, and the next call would compile again.

    Donated arguments come first, in the order in which they are returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and pairing a parameter
    with a moment of its shape costs XLA a copy of both.
    """

    row_axis = 0  # along which the `aux` of devices are stacked

    def __init__(self, step: StepT):
        self.step = step
        self._jitted: dict[Hashable, jax.stages.Wrapped] = {}
        self._known: ArrayMemo[tuple[PyTreeDef, jax.stages.Wrapped]] = ArrayMemo()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_jitted": {}}

    @abc.abstractmethod
    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Tree, ...]:
        """Checks what a call is given besides the state, and returns what is traced."""

    @abc.abstractmethod
    def body(self, *args: Any, **kwargs: Any) -> tuple[Tree, StepMetrics, Aux]:
        """The function to jit: `body(shardings, donated, kept, *traced)`.

        It is pure, and returns `(donated, metrics, aux)`.
        """

    def split(self, state: AnyStepState) -> tuple[Tree, Tree]:
        """Returns `(donated, kept)`; `donated` has `None` for what does not change."""
        return state, ()

    def after(self, old: AnyStepState, new: AnyStepState) -> None:
        """Is told the old and the new state of every call."""
        return

    def __call__(self, state: S, *args: Any, **kwargs: Any) -> tuple[S, StepMetrics]:
        self.step._require(state)
        traced = self.arguments(*args, **kwargs)
        state = self.step.prepared(state)
        jitted = self._at(state)
        donated, kept = self.split(state)
        if self.step.donate:
            traced = apart(traced, donated)
        donated, metrics, aux = jitted(donated, kept, *traced)
        new = completed(donated, state)
        self.after(state, new)
        self._known.remember(key_array(new), (_model_structure(state), jitted))
        return new, metrics._replace(aux=aux)

    def lower(
        self, state: AnyStepState, *args: Any, **kwargs: Any
    ) -> jax.stages.Lowered:
        self.step._require(state)
        traced = self.arguments(*args, **kwargs)
        return self._at(state).lower(*self.split(state), *traced)

    def make_ready(self, state: AnyStepState) -> None:
        """Compiles the program, unless it is compiled or nothing will be donated."""
        if all(map(is_concrete, jax.tree.leaves(state))):
            self.lower(state).compile()

    def _at(self, state: AnyStepState) -> jax.stages.Wrapped:
        """The jitted function for states with these shardings."""
        known = self._known.get(key_array(state))
        # The static part of a model, such as `train()`, may have changed.
        if known is not None and known[0] == _model_structure(state):
            return known[1]
        leaves, structure = jax.tree.flatten(state)
        found = [*map(sharding_of, leaves)]
        found = tuple(found) if any(x is not None for x in found) else None
        key = structure, found, all(map(is_concrete, leaves))
        if key not in self._jitted:
            self._jitted[key] = self._make(*key)
        return self._jitted[key]

    def _make(
        self, structure: PyTreeDef, found: Any, concrete: bool
    ) -> jax.stages.Wrapped:
        """The jitted function for states with these shardings."""
        of_params = out = None
        if found is not None:
            known = structure.unflatten([x or UNKNOWN for x in found])
            of_params = tuple(map(_or_none, jax.tree.leaves(known.params)))
            out = jax.tree.map(_or_none, self.split(known)[0])
        body = functools.partial(self.body, of_params)
        body = auto(body, self.step.devices, out, self.row_axis)
        return jax.jit(
            body,
            donate_argnums=0 if self.step.donate else (),
            out_shardings=(out, None, None) if found and concrete else None,
        )


UNKNOWN = object()  # in the place of a sharding, since `None` is not a leaf


def _or_none(x: Leaf) -> NamedSharding | None:
    return None if x is UNKNOWN else x


def _model_structure(state: AnyStepState) -> PyTreeDef:
    return jax.tree.structure(model_state_of(state))


@dataclasses.dataclass(eq=False, repr=False)
class Step(abc.ABC):
    """A step for a loss of parameters, for one micro-batch or for a whole window."""

    loss: Loss
    accumulation: Accumulation
    devices: Devices
    donate: bool
    _warned = False
    accumulates: ClassVar[bool]  # whether a window may be open between calls

    @abc.abstractmethod
    def __post_init__(self) -> None:
        """Makes the programs."""

    def init(self, params: Params, model_state: ModelState = None) -> Any:
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
          A `StepState`, or with `has_model_state=True` a `ModelStepState`.

        Raises:
          TypeError: a leaf is not an array; or `params` is an NNX model, and a variable
            is not an `nnx.Param` or is in two places; or there is a `model_state`
            without `has_model_state=True`, or the reverse.
          ValueError: an array is on a mesh other than the step's.
        """
        has_model_state = self.loss.has_model_state
        if has_model_state != (model_state is not None):
            got = "none" if model_state is None else "one"
            raise TypeError(
                f"A step with has_model_state={has_model_state} is begun with "
                f"step.init(params{', model_state' * has_model_state}): got {got}."
            )
        check_nnx_variables(params)
        leaves = jax.tree.leaves((params, model_state))
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        own = shapes_of if is_abstract else owned
        params = self.devices.place(own(params))
        init = self._of_shapes if is_abstract else self._init
        if not self._warned:
            self._warned = warn_of_whole_sums(self.devices, params)
        # Its own, because an optimizer may return an array that it keeps.
        opt_state = own(self.devices.init(init, params))
        if not has_model_state:
            return StepState(params, opt_state)
        model_state = stable(params, own(model_state))
        return ModelStepState(params, opt_state, self.devices.place(model_state))

    def _init(self, params: Params) -> TokenAccumulationState:
        sums: Gradients = ()
        if self.accumulates:
            sums = self.devices.zeros(params, self.accumulation.dtypes(params))
        return self.accumulation.init(params, sums)

    def _of_shapes(self, params: Params) -> TokenAccumulationState:
        """On a mesh, `init` is traced on an Explicit one, whose types tell where."""
        place = home(params)
        if not isinstance(place, NamedSharding):
            made = jax.eval_shape(self._init, params)
            return jax.tree.map(lambda x: put(x, x.sharding or place), made)
        mesh = place.mesh
        explicit = (AxisType.Explicit,) * len(mesh.axis_names)
        typed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=explicit)

        def on(mesh: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return put(x, NamedSharding(mesh, x.sharding.spec if x.sharding else P()))

        like = jax.tree.map(functools.partial(on, typed), params)
        with jax.sharding.use_abstract_mesh(typed):
            made = jax.eval_shape(self._init, like)
        return jax.tree.map(functools.partial(on, mesh), made)

    def _require(self, state: AnyStepState) -> None:
        """Raises if this step cannot take the state."""
        has_model_state = self.loss.has_model_state
        require_step_state(
            state, accumulates=self.accumulates, has_model_state=has_model_state
        )

    def prepared(self, state: S) -> S:
        """The state of a call, as the step's programs take it."""
        return state

    def _check_sums(self, sums: Gradients, params: Params) -> None:
        """Raises `ValueError` if the sums belong to a different number of devices."""
        leaves = jax.tree.leaves(params)
        for acc, p in zip(jax.tree.leaves(sums), leaves, strict=False):
            expected = (*self.devices.lead, *p.shape)
            if acc.shape != expected and p.shape in (acc.shape, acc.shape[1:]):
                raise ValueError(
                    "The sums of the open window must be laid out for this step's "
                    f"devices: expected shape {expected} in grad_sums, got "
                    f"{acc.shape}. Take over the state of a run on others with "
                    "regroup_sums(state, step.init(params))."
                )

    def _metrics(self, opt_state: TokenAccumulationState) -> StepMetrics:
        """The metrics of an open window."""
        loss, num_tokens = self.accumulation.window_so_far(opt_state)
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
        shardings: Shardings,
        closes: TracedBool,
        state: S,
    ) -> tuple[S, StepMetrics]:
        """If the window `closes`, applies its update to the parameters."""
        inner, devices = self.accumulation.inner, self.devices
        opt_state = state.opt_state
        check_inner_state(inner, opt_state.inner_opt_state, state.params)
        metrics = self._metrics(opt_state)

        def update(
            gradient: Gradients,
            norm: Callable[[], jax.Array],
            held: tuple[Params, jax.Array],
            inner_state: OptState,
        ) -> tuple[tuple[Params, jax.Array], OptState]:
            params, _ = held
            extra = {"value": metrics.loss, "num_tokens": metrics.num_tokens}
            updates, inner_state = inner.update(gradient, inner_state, params, **extra)
            params = jax.tree.map(_applied, params, updates)
            params = devices.held(params, shardings, like_sums=True)
            return (params, norm()), inner_state

        params = devices.held(state.params, shardings, like_sums=True)
        try:
            (params, grad_norm), closed = self.accumulation.close(
                opt_state,
                closes,
                params,
                update,
                otherwise=(params, metrics.grad_norm),
                total=lambda sums: devices.total(sums, shardings),
            )
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                "The optimizer of a step must need nothing but gradients, parameters, "
                f"value and num_tokens: {error}. Give update what it needs in a loop "
                "of your own, with token_accumulation; or leave out the line search, "
                "optax.lbfgs(1.0, linesearch=None)."
            ) from error
        # Gathered after the loop: 554 instead of 705 MB, and half the bytes.
        params = devices.held(params, shardings)
        metrics = metrics._replace(
            grad_norm=grad_norm,
            updated=closed.has_updated,
            mini_step=closed.mini_step,
            gradient_step=closed.gradient_step,
        )
        return state._replace(params=params, opt_state=closed), metrics


def _applied(param: jax.Array, update: jax.Array) -> Leaf:
    """The parameter plus its update, which weight decay gives an integer too."""
    is_trained = jnp.issubdtype(param.dtype, jnp.inexact)
    return optax.apply_updates(param, update) if is_trained else param


def shapes_of(tree: Tree) -> Tree:
    """Shapes in the place of arrays, with a sharding where one was chosen."""

    def shape_of(x: Leaf) -> jax.ShapeDtypeStruct:
        is_placed = getattr(x, "committed", hasattr(x, "sharding"))
        sharding = x.sharding if is_placed else None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(shape_of, tree)
