"""A train step under any sequence of calls, next to a float64 model of it."""

from typing import Any, NamedTuple

import helpers
import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import StepMetrics, TrainStep, make_train_step

pytestmark = pytest.mark.slow

RATE, MOMENTUM = 0.125, 0.5
INNER = optax.sgd(RATE, MOMENTUM)
START = np.array([1.0, -2.0, 0.5])


def loss_fn(params: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The sum over tokens of the squared distance to one target."""
    target, num_tokens = batch
    return num_tokens * jnp.sum((params - target) ** 2) / 2, num_tokens


class Kind(NamedTuple):
    """A step; a window closes with `k` micro-batches, or with `budget` tokens."""

    step: TrainStep
    k: Any = lambda _: np.inf
    budget: float = np.inf
    skips: bool = False


def by_step(gradient_step: Any) -> Any:
    return 1 + gradient_step % 3


KINDS = {
    "two programs": Kind(make_train_step(loss_fn, INNER, 3), k=lambda _: 3),
    "one program": Kind(make_train_step(loss_fn, INNER, by_step), k=by_step),
    "token budget and skip function": Kind(
        make_train_step(
            loss_fn,
            INNER,
            every_n_tokens=20,
            should_skip_update_fn=optax.skip_not_finite,
        ),
        budget=20,
        skips=True,
    ),
}


class Model(NamedTuple):
    """A window in NumPy: lists of micro-batches, divided when the window closes."""

    params: np.ndarray = START
    trace: np.ndarray = np.zeros(3)
    gradient_step: int = 0
    window: tuple[tuple[np.ndarray, float, float], ...] = ()

    def add(self, target: np.ndarray, num_tokens: float) -> "Model":
        error = self.params - target
        sums = num_tokens * error, num_tokens, num_tokens * (error**2).sum() / 2
        return self._replace(window=(*self.window, sums))

    @property
    def tokens(self) -> float:
        return sum(n for _, n, _ in self.window)

    def mean(self, place: int) -> Any:
        return sum(sums[place] for sums in self.window if sums[1]) / self.tokens

    def closed(self) -> "Model":
        if not self.tokens:
            return self._replace(window=())
        trace = self.mean(0) + MOMENTUM * self.trace
        return Model(self.params - RATE * trace, trace, self.gradient_step + 1)


def close_to(got: Any, expected: Any) -> None:
    # Parameters and targets are of size 4, and so are the numbers that cancel.
    rtol = helpers.RTOL["float32"]
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=4 * rtol)


class Loop(stateful.RuleBasedStateMachine):
    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.state = self.kind.step.init(jnp.asarray(START, jnp.float32))
        self.model = Model()
        self.saved: list[tuple[Any, Model]] = []

    def check(self, metrics: StepMetrics, before: Model, skipped: bool = False) -> None:
        """Check metrics; `before` is the model when its window closed, if it did."""
        tokens = before.tokens
        updated = self.model.gradient_step > before.gradient_step
        assert bool(metrics.updated) == updated
        assert bool(metrics.skipped) == skipped
        assert metrics.num_tokens == tokens
        assert metrics.mini_step == len(self.model.window)
        assert metrics.gradient_step == self.model.gradient_step
        close_to(metrics.loss, before.mean(2) if tokens else 0)
        close_to(metrics.grad_norm, np.linalg.norm(before.mean(0)) if updated else 0)

    @stateful.rule(
        aim=st.sampled_from([0.0, 1.0, -3.0, np.inf]),
        num_tokens=st.one_of(st.integers(0, 16), st.sampled_from([0.5, 0.125])),
    )
    def micro_batch(self, aim: float, num_tokens: float) -> None:
        target = aim + np.arange(3.0)
        skipped = num_tokens > 0 and np.isinf(aim)
        hypothesis.assume(self.kind.skips or not skipped)
        # A mean over no tokens is 0/0, which must have no effect.
        given = target if num_tokens else np.full(3, np.nan)
        self.state, metrics = self.kind.step(
            self.state, (jnp.float32(given), jnp.float32(num_tokens))
        )
        before = self.model
        if not skipped:
            before = before.add(target if num_tokens else START, num_tokens)
            is_full = len(before.window) >= self.kind.k(before.gradient_step)
            due = is_full or before.tokens >= self.kind.budget
            self.model = before.closed() if due else before
        self.check(metrics, before, skipped)

    @stateful.rule()
    def close_window(self) -> None:
        before = self.model
        self.state, metrics = self.kind.step.close_window(self.state)
        self.model = before.closed()
        self.check(metrics, before)

    @stateful.rule()
    def save(self) -> None:
        self.saved.append((jax.device_get(self.state), self.model))

    @stateful.precondition(lambda self: self.saved)
    @stateful.rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        state, self.model = data.draw(st.sampled_from(self.saved))
        self.state = jax.tree.map(jnp.asarray, state)

    @stateful.invariant()
    def parameters_and_momentum_are_those_of_the_model(self) -> None:
        close_to(self.state.params, self.model.params)
        (trace, _) = self.state.opt_state.inner_opt_state
        close_to(trace.trace, self.model.trace)


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_calls_follows_the_model(kind: str):
    class LoopOfKind(Loop):
        pass

    LoopOfKind.kind = KINDS[kind]
    stateful.run_state_machine_as_test(
        LoopOfKind,
        settings=hypothesis.settings(
            deadline=None, max_examples=30, stateful_step_count=30
        ),
    )
