"""What `docs/traps.md` says of other libraries, run against their newest versions.

A test that fails here says that a row of the page is out of date.
"""

import re
from pathlib import Path
from typing import Any

import grain
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_tokenaccum import make_train_step, token_accumulation

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/traps.md").read_text()
KEY = jax.random.key(0)
newest = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="newest versions")


def test_every_row_names_a_test_or_a_script_that_exists():
    rows = [x for x in PAGE.splitlines() if x.startswith("| ") and x[:8] != "| you do"]
    tests = {path.name: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    for row in rows:
        shown = row.split("|")[-2]
        [name] = re.findall(r"`([^`]+)`", shown)
        file, _, function = name.partition("::")
        if file.endswith(".sh"):
            assert (ROOT / "findings" / file).is_file(), row
        else:
            assert f"def {function}(" in tests[file], row
    assert len(PAGE.splitlines()) <= 120


@newest
def test_fold_in_is_split():
    folded = jax.random.key_data(jax.random.fold_in(KEY, 1))
    split = jax.random.key_data(jax.random.split(KEY, 4)[1])
    np.testing.assert_array_equal(folded, split)


@newest
def test_hyperparameters_are_injected_in_the_dtype_of_the_parameters():
    tx, params = optax.inject_hyperparams(optax.adam)(1e-3), jnp.ones(2, jnp.bfloat16)
    updates, state = tx.update(params, tx.init(params))
    assert state.hyperparams["b2"] == 1 and jnp.isnan(updates).all()
    fixed = optax.inject_hyperparams(
        optax.adam, static_args=("b1", "b2", "eps", "eps_root")
    )
    tx = fixed(learning_rate=1e-3)
    assert jnp.isfinite(tx.update(params, tx.init(params))[0]).all()


@newest
def test_the_second_moment_of_bfloat16_parameters_never_decays():
    tx, one = optax.scale_by_adam(), jnp.ones((), jnp.bfloat16)
    _, state = tx.update(one, tx.init(one))
    first = state.nu
    for _ in range(50):
        _, state = tx.update(jnp.zeros_like(one), state)
    assert state.nu == first > 0


@newest
def test_float16_over_a_count_of_100000_is_0():
    assert jnp.float16(60000) / jnp.int32(100_000) == 0


@newest
def test_a_rule_of_another_dtype_is_not_refused():
    @jax.custom_vjp
    def twice(x: jax.Array) -> jax.Array:
        return x * 2

    twice.defvjp(lambda x: (x * 2, None), lambda _, g: ((2 * g).astype(jnp.bfloat16),))
    assert jax.grad(twice)(jnp.float32(1)).dtype == jnp.bfloat16


@newest
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_loop_adds_the_gradient_of_a_bfloat16_weight_in_bfloat16(is_cast: bool):
    def loss(w: jax.Array) -> jax.Array:
        w = w.astype(jnp.float32) if is_cast else w

        def body(so_far: jax.Array, _: None) -> tuple[jax.Array, None]:
            return so_far + w.astype(jnp.bfloat16).astype(jnp.float32), None

        return jax.lax.scan(body, jnp.float32(0), length=1000)[0]

    gradient = jax.grad(loss)(jnp.bfloat16(1))
    assert gradient == (1000 if is_cast else 256)


@newest
def test_writes_in_a_checkpoint_happen_twice():
    calls = jax.new_ref(jnp.zeros(()))

    def counted(x: jax.Array) -> jax.Array:
        calls[...] += 1
        return jnp.sin(x) * x

    jax.jit(jax.grad(lambda x: jax.checkpoint(counted)(x)))(1.0)
    assert calls[...] == 2


@newest
def test_unsigned_labels_are_never_minus_100():
    assert (np.array([156], np.uint8) != -100).all()
    assert (np.array([-100]).astype(np.uint8) == 156).all()


@newest
@pytest.mark.needs(devices=8)
def test_a_mean_of_integers_over_devices_overflows():
    x = jnp.full(8, 300_000_000, jnp.int32)
    mean = jax.vmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i")(x)
    assert (mean < 0).all()


@newest
def test_layer_norm_of_a_masked_row_has_a_nan_gradient():
    norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    gradient = jax.grad(lambda x: norm(x, mask=jnp.zeros((2, 4), bool)).sum())
    assert jnp.isnan(gradient(jnp.ones((2, 4)))).all()


@newest
def test_a_call_of_spectral_norm_overwrites_the_weight_also_in_evaluation():
    norm = nnx.SpectralNorm(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    before = jnp.copy(norm.layer_instance.kernel[...])
    norm(jnp.ones((2, 3)), update_stats=False)
    assert (norm.layer_instance.kernel[...] != before).any()


@newest
def test_an_elastic_iterator_leaves_out_the_last_rows():
    rows, shard = grain.MapDataset.range(40), grain.sharding.ShardOptions(0, 1)
    batches = [*grain.experimental.ElasticIterator(rows, 16, shard)]
    assert sum(map(len, batches)) == 32
    assert sum(map(len, rows.batch(16))) == 40


@newest
def test_an_rnn_returns_the_carry_after_the_padding_of_an_empty_row():
    rnn = nnx.RNN(nnx.SimpleCell(3, 3, rngs=nnx.Rngs(0)), return_carry=True)
    carries = [rnn(jnp.ones((1, 4, 3)), seq_lengths=jnp.array([n]))[0] for n in (0, 4)]
    np.testing.assert_array_equal(*carries)


def test_our_norm_of_many_bfloat16_arrays_is_added_in_float32():
    params = {str(i): jnp.ones((), jnp.bfloat16) for i in range(300)}

    def loss_fn(params: Any, x: jax.Array) -> Any:
        return jnp.sum(x) * sum(jax.tree.map(jnp.float32, params).values()), 1

    step = make_train_step(loss_fn, optax.sgd(1e-3), 1)
    _, metrics = step(step.init(params), jnp.ones(()))
    np.testing.assert_allclose(metrics.grad_norm, 300**0.5, rtol=1e-6)
    assert optax.tree.norm(params) == 16  # added in bfloat16


def test_an_optimizer_mapped_over_stacked_layers_is_that_of_a_list():
    layers = jnp.stack([helpers.init_params(i)["hidden"] * 10.0**i for i in range(3)])

    def updates(tx: Any, params: Any) -> Any:
        tx = token_accumulation(tx, 1)
        grads = jax.tree.map(jnp.cos, params)
        updates, _ = tx.update(grads, tx.init(params), params, num_tokens=1)
        return updates

    def mapped(tx: Any) -> Any:
        return optax.GradientTransformation(*map(jax.vmap, tx))

    for tx in (optax.adaptive_grad_clip(0.01), optax.scale_by_trust_ratio()):
        expected = jnp.stack(updates(tx, [*layers]))
        np.testing.assert_allclose(updates(mapped(tx), layers), expected, rtol=1e-5)
        assert helpers.relative_error(updates(tx, layers), expected) > 0.1
