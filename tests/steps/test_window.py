"""A whole window in one program: `window_value_and_grad`, `make_window_step`."""

import operator
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    StepState,
    make_train_step,
    make_window_step,
    regroup_sums,
    split_batch,
    window_value_and_grad,
)

KS = [1, 2, 4, 8, 16, 32]

full_batch = jax.jit(jax.value_and_grad(helpers.loss_mean_fn, has_aux=True))


@pytest.mark.parametrize(("seeds", "mode"), [(5, "jit"), (2, "eager")])
@pytest.mark.parametrize("k", KS)
def test_gradient_is_that_of_the_full_batch_and_the_naive_one_is_not(
    k: int, seeds: int, mode: str
):
    f = window_value_and_grad(helpers.loss_sum_fn)
    f = jax.jit(f) if mode == "jit" else f
    errors, full_errors, naive_errors = [], [], []
    for seed in range(seeds):
        params, batch = helpers.init_params(seed), helpers.ragged_batch(seed)
        reference = helpers.float64_gradient(params, batch)
        (loss, (num_tokens, aux)), grads = f(params, helpers.stacked(batch, k))
        (full_loss, _), full_grads = full_batch(params, batch)
        np.testing.assert_allclose(loss, full_loss, rtol=1e-6)
        assert float(num_tokens) == batch["mask"].sum()
        assert aux is None
        means = [full_batch(params, part)[1] for part in helpers.cut(batch, k)]
        naive = jax.tree.map(lambda *gs: sum(gs) / k, *means)
        for gradient, collected in (
            (grads, errors),
            (full_grads, full_errors),
            (naive, naive_errors),
        ):
            collected.append(helpers.relative_error(gradient, reference))
    assert np.median(errors) <= 2 * np.median(full_errors)
    assert k == 1 or np.median(naive_errors) > 0.01


def test_partial_windows_of_every_size_are_one_compilation():
    k, params, batch = 8, helpers.init_params(1), helpers.ragged_batch(1)
    micro_batches = jax.device_put(helpers.stacked(batch, k))
    inner = optax.sgd(1.0, momentum=0.0)
    step = make_window_step(helpers.loss_sum_fn, inner)
    f = jax.jit(
        lambda n: window_value_and_grad(helpers.loss_sum_fn)(
            params, micro_batches, num_micro_batches=n
        )
    )
    states = [step.init(params) for _ in range(k)]
    with helpers.count_compilations() as compilations:
        results = [f(n) for n in range(1, k + 1)]
        stepped = [
            step(state, micro_batches, num_micro_batches=n)
            for n, state in enumerate(states, start=1)
        ]
    assert len(compilations) == 2
    number = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = jax.eval_shape(step.init, params)
    step.lower(shapes, micro_batches, num_micro_batches=number)
    for n in range(1, k + 1):
        rows = jax.tree.map(operator.itemgetter(slice(n * helpers.ROWS // k)), batch)
        reference = helpers.float64_gradient(params, rows)
        (_, (num_tokens, _)), grads = results[n - 1]
        assert helpers.relative_error(grads, reference) < helpers.RTOL["float32"]
        assert float(num_tokens) == rows["mask"].sum()
        state, metrics = stepped[n - 1]
        given = optax.tree.get(state.opt_state, "trace")
        assert helpers.relative_error(given, reference) < helpers.RTOL["float32"]
        assert float(metrics.num_tokens) == rows["mask"].sum()


def sum_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch["x"]), jnp.sum(batch["n"])


PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}


def test_micro_batches_without_tokens_add_nothing_even_if_nan(maybe_jit: Any):
    f = maybe_jit(window_value_and_grad(sum_fn))
    x = jnp.asarray([[2.0], [np.nan], [90.0]])
    n = jnp.asarray([[1.0], [0.0], [9.0]])
    (loss, (num_tokens, _)), grads = f(PARAMS, {"x": x, "n": n})
    np.testing.assert_allclose(grads["w"], [9.2, 9.2], rtol=1e-6)
    np.testing.assert_allclose(loss, -9.2, rtol=1e-6)
    assert float(num_tokens) == 10.0


def test_window_without_tokens_is_zero_and_updates_nothing():
    micro_batches = {"x": jnp.full((3, 1), np.nan), "n": jnp.zeros((3, 1))}
    (loss, (num_tokens, _)), grads = window_value_and_grad(sum_fn)(
        PARAMS, micro_batches
    )
    assert (float(loss), float(num_tokens)) == (0.0, 0.0)
    chex.assert_trees_all_equal(grads, {"w": np.zeros(2)})
    step = make_window_step(sum_fn, optax.adamw(0.1))
    start = step.init(PARAMS)
    before = jax.tree.map(np.asarray, start)
    state, metrics = step(start, micro_batches)
    chex.assert_trees_all_equal(state, before)
    assert not metrics.updated and int(metrics.gradient_step) == 0
    state, metrics = step(state, micro_batches, num_micro_batches=0)
    chex.assert_trees_all_equal(state, before)


def test_aux_is_stacked_and_zero_where_not_run():
    def with_aux(params: Any, batch: Any) -> Any:
        loss_sum, n = sum_fn(params, batch)
        return loss_sum, (n, {"x": batch["x"], "square": batch["x"][0] ** 2})

    micro_batches = {"x": jnp.arange(1.0, 5.0)[:, None], "n": jnp.ones((4, 1))}
    f = window_value_and_grad(with_aux, has_aux=True)
    (_, (_, aux)), _ = f(PARAMS, micro_batches)
    chex.assert_trees_all_equal(aux["x"], micro_batches["x"])
    chex.assert_trees_all_equal(aux["square"], np.array([1.0, 4.0, 9.0, 16.0]))
    (_, (_, aux)), _ = f(PARAMS, micro_batches, num_micro_batches=2)
    chex.assert_trees_all_equal(aux["square"], np.array([1.0, 4.0, 0.0, 0.0]))
    step = make_window_step(with_aux, optax.sgd(0.1), has_aux=True)
    _, metrics = step(step.init(PARAMS), micro_batches)
    chex.assert_trees_all_equal(metrics.aux["square"], np.array([1.0, 4.0, 9.0, 16.0]))


def test_batches_may_hold_keys_and_aux_plain_numbers():
    def loss_fn(params: Any, batch: Any) -> Any:
        noise = jax.random.normal(batch["key"], (2,))
        return jnp.sum(params["w"] * noise), (2, {"noise": noise, "two": 2.0})

    keys = jax.random.split(jax.random.key(0), 3)
    f = window_value_and_grad(loss_fn, has_aux=True)
    (_, (_, aux)), grads = f(PARAMS, {"key": keys})
    np.testing.assert_allclose(grads["w"], aux["noise"].sum(0) / 6, rtol=1e-5)
    assert aux["two"].tolist() == [2.0] * 3


def test_every_micro_batch_has_a_key_of_its_own():
    def loss_fn(params: Any, batch: Any, *, rng: Any) -> Any:
        return jnp.sum(params["w"]) * batch, (1, jax.random.key_data(rng))

    f = jax.jit(window_value_and_grad(loss_fn, has_aux=True))
    keys = [
        f(PARAMS, jnp.ones(6), rng=jax.random.key(seed))[0][1][1] for seed in (0, 1)
    ]
    assert len({tuple(key) for key in np.concatenate(keys).tolist()}) == 12


def test_loss_kwargs_are_arguments_and_not_differentiated():
    def loss_fn(params: Any, batch: Any, *, frozen: Any, train: bool) -> Any:
        assert train is True
        return jnp.sum(params["w"] * frozen) * jnp.sum(batch), batch.size

    step = make_window_step(loss_fn, optax.sgd(1.0))
    state = step.init(PARAMS)
    batches = np.ones((2, 4), np.float32)
    with helpers.count_compilations() as compilations:
        for scale in (1.0, 2.0):
            before = np.asarray(state.params["w"])
            frozen = np.asarray([scale, 0.0], np.float32)
            state, _ = step(state, batches, frozen=frozen, train=True)
            np.testing.assert_array_equal(
                before - np.asarray(state.params["w"]), frozen
            )
    assert len(compilations) == 1


def test_step_takes_the_update_of_the_train_step():
    params, batch = helpers.init_params(2), helpers.ragged_batch(2)
    inner = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.1))
    window_step = make_window_step(helpers.loss_sum_fn, inner)
    train_step = make_train_step(helpers.loss_sum_fn, inner, 8)
    window_state, state = window_step.init(params), train_step.init(params)
    for _ in range(3):
        window_state, window_metrics = window_step(
            window_state, helpers.stacked(batch, 8)
        )
        for micro_batch in helpers.cut(batch, 8):
            state, metrics = train_step(state, micro_batch)
    assert (
        helpers.relative_error(window_state.params, state.params)
        < helpers.RTOL["float32"]
    )
    for field in ("loss", "num_tokens", "grad_norm"):
        np.testing.assert_allclose(
            getattr(window_metrics, field), getattr(metrics, field), rtol=1e-4
        )
    assert bool(window_metrics.updated) and int(window_metrics.mini_step) == 0


def test_state_holds_the_inner_optimizers_own_and_checkpoints_of_it_load():
    inner = optax.adam(0.1)
    step = make_window_step(sum_fn, inner)
    state, bare = step.init(PARAMS), jax.tree.map(jnp.copy, inner.init(PARAMS))
    chex.assert_trees_all_equal(state.opt_state.inner_opt_state, bare)
    micro_batches = {"x": jnp.ones((2, 1)), "n": jnp.ones((2, 1))}
    first, _ = step(state, micro_batches)
    loaded = step.init(PARAMS)
    opt_state = loaded.opt_state._replace(inner_opt_state=bare)
    again, _ = step(loaded._replace(opt_state=opt_state), micro_batches)
    chex.assert_trees_all_equal(first, again)


@pytest.mark.parametrize(
    "inner", [optax.adam(0.1), optax.sgd(0.1)], ids=["adam", "sgd"]
)
def test_a_state_of_0_2_0_raises_and_is_taken_over(inner: Any):
    step = make_window_step(sum_fn, inner)
    micro_batches = {"x": jnp.ones((2, 1)), "n": jnp.ones((2, 1))}
    moved, _ = step(step.init(PARAMS), micro_batches)
    old = StepState(moved.params, moved.opt_state.inner_opt_state)
    with pytest.raises(TypeError, match="regroup_sums"):
        step(old, micro_batches)
    dictionary = {"params": old.params, "opt_state": [*old.opt_state]}
    for saved in (old, jax.device_get(old), dictionary):
        for like in (step.init(PARAMS), jax.eval_shape(step.init, PARAMS)):
            taken = regroup_sums(saved, like)
            chex.assert_trees_all_equal_shapes_and_dtypes(taken, moved)
            inner_opt_state = taken.opt_state.inner_opt_state
            chex.assert_trees_all_equal(inner_opt_state, old.opt_state)
            assert taken.opt_state.gradient_step == 0
    chex.assert_trees_all_equal(regroup_sums(moved, step.init(PARAMS)), moved)
    of_other = make_window_step(sum_fn, optax.sgd(0.1, momentum=0.9)).init(PARAMS)
    with pytest.raises(ValueError, match="the same training"):
        regroup_sums(old, of_other)
    with helpers.count_compilations() as compilations:
        _, metrics = step(taken, micro_batches)
    assert metrics.gradient_step == 1 and len(compilations) == 0
    with pytest.raises(ValueError, match="donated"):  # it holds the same arrays
        regroup_sums(old, step.init(PARAMS))


def test_rejected_micro_batches_never_happened():
    step = make_window_step(
        sum_fn, optax.sgd(1.0), should_skip_update_fn=optax.skip_not_finite
    )
    x = jnp.asarray([[np.nan], [2.0], [np.inf], [90.0]])
    n = jnp.asarray([[5.0], [1.0], [7.0], [9.0]])
    state, metrics = step(step.init(PARAMS), {"x": x, "n": n})
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 9.2, rtol=1e-6)
    assert bool(metrics.skipped) and float(metrics.num_tokens) == 10.0


def test_donates_in_place_and_compiles_once():
    params = jax.tree.map(jnp.copy, PARAMS)
    step = make_window_step(sum_fn, optax.adamw(0.1))
    state = step.init(params)
    micro_batches = {"x": np.ones((2, 1), np.float32), "n": np.ones((2, 1), np.float32)}
    with helpers.count_compilations() as compilations:
        for _ in range(20):
            old = state
            state, metrics = step(state, micro_batches)
            assert old.params["w"].is_deleted()
    assert len(compilations) == 1
    chex.assert_trees_all_equal(params, PARAMS)
    kept = step(step.init(PARAMS), micro_batches)[1]
    jax.tree.map(lambda x: x.delete(), state)
    assert np.isfinite([float(kept.loss), float(metrics.loss)]).all()


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.prodigy(0.1),
        optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)),
    ],
    ids=["prodigy", "add_noise"],
)
def test_optimizers_that_hand_out_arrays_of_their_own_can_be_donated(inner: Any):
    step = make_window_step(sum_fn, inner)
    micro_batches = {"x": jnp.ones((2, 1)), "n": jnp.ones((2, 1))}
    for _ in range(2):
        state = step.init(PARAMS)
        for _ in range(2):
            state, metrics = step(state, micro_batches)
        assert metrics.updated


def test_split_batch_keeps_every_row_once_and_each_device_its_rows():
    batch = {"x": np.arange(24).reshape(12, 2), "y": jnp.arange(12)}
    split = split_batch(batch, 3)
    assert split["x"].shape == (3, 4, 2) and split["y"].shape == (3, 4)
    assert sorted(np.asarray(split["y"]).ravel().tolist()) == list(range(12))
    np.testing.assert_array_equal(split["x"][..., 0], 2 * np.asarray(split["y"]))
    # The first half of the rows becomes the first half of every micro-batch.
    assert np.asarray(split["y"])[:, :2].max() < 6
    assert isinstance(split["x"], np.ndarray)
    jitted = jax.jit(split_batch, static_argnums=1)(batch, 3)
    chex.assert_trees_all_equal(jitted, split)


@pytest.mark.parametrize(
    ("batch", "k", "message"),
    [
        ({"x": np.ones(6)}, 0, "k must be an integer of at least 1: got 0"),
        ({"x": np.ones(6), "y": np.ones(3)}, 3, r"6 at \['x'\] and 3 at \['y'\]"),
        ({"x": np.ones(6), "y": np.float32(1)}, 3, r"shape \(\) at \['y'\]"),
        ({}, 3, "must hold at least one array"),
    ],
    ids=["zero", "axes", "scalar", "empty"],
)
def test_split_batch_names_what_does_not_fit(batch: Any, k: int, message: str):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, k)


def test_windows_that_do_not_fit():
    f = window_value_and_grad(sum_fn)
    good = {"x": jnp.ones((4, 1)), "n": jnp.ones((4, 1))}
    with pytest.raises(ValueError, match=r"leading axis of at least 1.*\['n'\]"):
        f(PARAMS, jax.tree.map(lambda x: x[:0], good))
    with pytest.raises(ValueError, match="at least 0: got -1"):
        f(PARAMS, good, num_micro_batches=-1)
    with pytest.raises(TypeError, match="num_micro_batches must be an integer"):
        f(PARAMS, good, num_micro_batches=2.0)
    with pytest.raises(TypeError, match="must be an integer scalar: got float32"):
        jax.jit(f)(PARAMS, good, num_micro_batches=jnp.asarray(2.0))
    with pytest.raises(TypeError, match="loss_fn must return"):
        window_value_and_grad(lambda p, b: jnp.sum(p["w"]))(PARAMS, good)


def window_step_on(mesh: Any) -> Any:
    return make_window_step(
        loss_sum_of_rows, optax.sgd(1.0), mesh=mesh, data_axes=mesh and "data"
    )


def loss_sum_of_rows(w: Any, batch: Any) -> Any:
    return jnp.sum(jnp.einsum("ri,i->r", batch["x"], w) - batch["y"]), len(batch["y"])


WITH_WINDOWS = {
    "function": lambda w, batch: window_value_and_grad(loss_sum_of_rows)(w, batch),
    "in jit": lambda w, batch: jax.jit(window_value_and_grad(loss_sum_of_rows))(
        w, batch
    ),
    "count_fn": lambda w, batch: window_value_and_grad(
        lambda w, batch: {"a": loss_sum_of_rows(w, batch)[0]},
        count_fn=lambda batch: {"a": jnp.sum(batch["x"], axis=1)},
    )(w, batch),
    "step": lambda w, batch: (step := window_step_on(None))(step.init(w), batch),
    "step on a mesh": lambda w, batch: (
        step := window_step_on(jax.sharding.Mesh(jax.devices()[:1], "data"))
    )(step.init(w), batch),
}


@pytest.mark.parametrize("run", WITH_WINDOWS.values(), ids=WITH_WINDOWS)
def test_batch_that_was_not_split(run: Any):
    """The loss raises the error, with a note on the shapes that it was given."""
    batch = {"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}
    with pytest.raises((ValueError, TypeError)) as raised:
        run(jnp.zeros(3), batch)
    notes = "".join(raised.value.__notes__)  # jax adds notes, too
    assert notes.count("split_batch(batch, k)") == 1
    assert "got shape (3,) at ['x'], () at ['y']." in notes


@pytest.mark.parametrize("rows", [(2, 2), (1, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("run", WITH_WINDOWS.values(), ids=WITH_WINDOWS)
def test_a_list_of_micro_batches(run: Any, rows: tuple[int, int]):
    batches = [{"x": np.ones((n, 3), np.float32), "y": np.ones(n)} for n in rows]
    with pytest.raises((ValueError, TypeError)) as raised:
        run(jnp.zeros(3), batches)
    notes = "".join(raised.value.__notes__)
    assert notes.count("must be stacked into one tree") == 1


def test_a_window_may_be_a_list_of_trees():
    def loss_fn(w: Any, pair: Any) -> Any:
        chosen, rejected = pair
        return jnp.sum(w * (chosen["x"] - rejected["x"])), chosen["x"].size

    pair = [{"x": jnp.full((4, 2), 3.0)}, {"x": jnp.ones((4, 2))}]
    (loss, _), _ = window_value_and_grad(loss_fn)(jnp.ones(()), pair)
    assert loss == 2


def test_batch_that_was_not_split_among_devices():
    """The second axis is taken for the rows."""
    step = window_step_on(jax.sharding.Mesh(jax.devices(), "data"))
    with pytest.raises(ValueError, match="rows .* multiple of the 8") as raised:
        step(step.init(jnp.zeros(3)), {"x": np.ones((8, 3)), "y": np.ones(8)})
    assert "got shape (8, 3) at ['x']" in raised.value.__notes__[0]


def test_a_skip_function_is_told_the_number_of_updates():
    """Before 0.3.0 it was always told 0."""

    def after_one(updates: Any, gradient_step: Any, params: Any) -> tuple[Any, Any]:
        return gradient_step >= 1, ()

    step = make_window_step(
        lambda w, x: (jnp.sum(w * x), x.size),
        optax.sgd(1.0),
        should_skip_update_fn=after_one,
    )
    state, seen = step.init(jnp.zeros(())), []
    for _ in range(2):
        state, metrics = step(state, jnp.ones((2, 3)))
        seen.append((bool(metrics.updated), bool(metrics.skipped)))
    assert seen == [(True, False), (False, True)]
    assert state.params == -1
