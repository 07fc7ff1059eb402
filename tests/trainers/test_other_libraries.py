"""Crossings with libraries that need an environment of their own, skipped in others.

Two environments for `pytest -m slow tests/trainers/test_other_libraries.py`:
pip install -e ".[test]" jax==0.12.0.1 qwix==0.1.8 tokamax==0.0.17 jax-privacy==2.0.0 \
  netket==3.23.0 numpyro==0.22.0
pip install -e ".[test]" jax==0.10.2 haliax==1.4.dev453
"""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from crossings import compare, exact_and_naive, layered, whole
from flax import nnx
from helpers import relative_error

from optax_tokenaccum import (
    coupled_value_and_grad,
    token_accumulation,
    with_num_tokens,
)
from optax_tokenaccum.debug import check_loss_fn
from optax_tokenaccum.nnx import make_train_step as make_nnx_step

K, PARAMS = 4, helpers.init_params(0)
TEXT = [helpers.cut(helpers.ragged_batch(seed, 8), K) for seed in range(2)]
ROWS = problems.batches_of(1, 7, 2, 8)


def other(name: str) -> Any:
    reason = "an environment of its own has it"
    return pytest.importorskip(name, reason=reason, exc_type=ImportError)


def slow(f: Any) -> Any:
    """Of a package that is not in the newest environment, and may warn."""
    return pytest.mark.slow(pytest.mark.filterwarnings("default")(f))


QWIX: dict[str, dict[str, Any]] = {
    "weights": {"weight_qtype": "int8"},
    "rows": {"weight_qtype": "int8", "act_qtype": "int8"},
    "gradients": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
}


@slow
@pytest.mark.parametrize("rule", QWIX)
def test_qwix(rule: str):
    """Gradients of weights have scales over rows, which depend on the cut."""
    qwix = other("qwix")
    keys = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=keys), nnx.Linear(16, 1, rngs=keys))
    provider = qwix.QtProvider([qwix.QtRule(module_path=".*", **QWIX[rule])])
    graph, params = nnx.split(qwix.quantize_model(model, provider, ROWS[0]["x"]))

    def loss_fn(params: Any, batch: Any) -> Any:
        return problems.squares(nnx.merge(graph, params)(batch["x"])[:, 0], batch)

    report = check_loss_fn(loss_fn, params, ROWS, mask="weights")
    got = problems.train_step(loss_fn, params, ROWS)
    if rule != "gradients":
        return compare(got, loss_fn, params, ROWS), report.assert_exact()
    exact, naive = exact_and_naive(loss_fn, params, ROWS)
    assert 1e-4 < relative_error(got, exact) < 0.05 < relative_error(naive, exact)
    assert not report.passed


@slow
def test_qwix_static_scales_are_of_all_rows_of_each_micro_batch():
    qwix = other("qwix")
    rule = qwix.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    model = nnx.Sequential(nnx.Linear(8, 1, rngs=nnx.Rngs(0)))
    model = qwix.quantize_model(model, qwix.QtProvider([rule]), ROWS[0]["x"])
    optimizer = nnx.Optimizer(
        model, token_accumulation(optax.sgd(0.1), K), wrt=nnx.Param
    )
    step = make_nnx_step(lambda model, x: problems.squares(model(x["x"])[:, 0], x))
    for batch in ROWS:  # of 8 rows, of which 1, 7, 2 and 8 count
        step(model, optimizer, batch)
    [found] = nnx.to_flat_state(nnx.state(model, qwix.QuantStat)).leaves
    largest = [np.abs(x["x"]).max(1) for x in ROWS]
    counts = [x["weights"] for x in ROWS]
    mean = found.get_value()["sum_of_absmax"].item() / found.get_value()["count"]
    assert mean == pytest.approx(np.mean(largest), rel=1e-5)
    assert mean != pytest.approx(np.average(largest, weights=counts), rel=1e-3)


@slow
@pytest.mark.parametrize("kind", ["mask", "ignored label", "chunked"])
def test_tokamax_losses(kind: str):
    """The row of a label of -100 has no loss, and a gradient; 32 words are padded."""
    tokamax = other("tokamax")
    implementation = "chunked_xla" if kind == "chunked" else "xla"

    def loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.tanh(params["embed"][batch["tokens"]] @ params["hidden"])
        mask, labels = batch["mask"], batch["labels"]
        losses = tokamax.linear_softmax_cross_entropy_loss(
            x.reshape(-1, helpers.WIDTH),
            (jnp.where(mask, labels, -100) if kind[0] == "i" else labels).ravel(),
            params["out"],
            reduction="none",
            implementation=implementation,
        )
        return jnp.sum(losses * (mask.ravel() if kind[0] != "i" else 1)), mask.sum()

    got = problems.train_step(loss_fn, PARAMS, TEXT[0])
    if kind == "mask":
        return compare(got, helpers.loss_sum_fn, PARAMS, TEXT[0])
    exact, _ = exact_and_naive(helpers.loss_sum_fn, PARAMS, TEXT[0])
    assert relative_error(got, exact) > 0.5
    values = [f(PARAMS, whole(TEXT[0]))[0] for f in (loss_fn, helpers.loss_sum_fn)]
    assert (relative_error(*values) < 1e-6) == (kind == "ignored label")


@slow
def test_tokamax_ragged_dot_of_experts_in_a_scan():
    ragged_dot = other("tokamax").ragged_dot

    def experts(dot: Any) -> Any:
        def multiply(x: Any, w: Any) -> Any:
            expert = jnp.argmax(x[:, :3], -1)
            order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=3)
            return dot(x[order], w, sizes.astype(jnp.int32))[jnp.argsort(order)]

        return layered(multiply)

    def dense(x: Any, w: Any, sizes: Any) -> Any:
        return jnp.einsum(
            "ri,rio->ro", x, jnp.repeat(w, sizes, 0, total_repeat_length=len(x))
        )

    params = {"layers": problems.normal(0, 2, 3, 8, 8), "out": problems.normal(1, 8)}
    compare(
        problems.train_step(experts(ragged_dot), params, ROWS),
        experts(dense),
        params,
        ROWS,
    )


@slow
def test_jax_privacy():
    """The counts of a window add up to a constant; noise is drawn once per window."""
    privacy, lengths, expected, clip = other("jax_privacy"), [1, 4, 2, 0], 8.0, 0.05
    batches = helpers.cut(helpers.ragged_batch(0, 16), K)
    padding = [np.arange(4) >= n for n in lengths]
    noise = privacy.noise_addition.gaussian_privatizer(stddev=0.01, prng_key=3)

    def mean(params: Any, batch: Any) -> Any:
        return jnp.divide(*helpers.loss_sum_fn(params, batch))

    def by_hand(params: Any, batch: Any) -> Any:
        rows = jax.tree.map(lambda x: x[:, None], batch)
        grads = jax.vmap(jax.grad(mean), (None, 0))(params, rows)
        scale = jnp.minimum(1, clip / jax.vmap(optax.tree.norm)(grads))
        scale *= ~np.concatenate(padding) / expected
        return jax.tree.map(lambda g: jnp.einsum("r,r...", scale, g), grads)

    exact = noise.update(by_hand(PARAMS, whole(batches)), noise.init(PARAMS))[0]
    f = privacy.clipped_grad(mean, l2_clip_norm=clip)
    calls = [*zip(batches, padding, lengths, strict=True)]
    sums = [f(PARAMS, batch, is_padding_example=x) for batch, x, _ in calls]

    def window(tx: Any, counts: Any) -> Any:
        tx = token_accumulation(tx, K)
        state, update = tx.init(PARAMS), None
        for x, n in zip(sums, counts, strict=True):
            update, state = tx.update(x, state, PARAMS, num_tokens=n)
        return update

    assert relative_error(window(noise, [expected / K] * K), exact) < 1e-5
    assert relative_error(window(noise, lengths), exact) > 0.005
    means = [
        optax.tree.scale(1 / max(n, 1) / K, x)
        for x, n in zip(sums, lengths, strict=True)
    ]
    naive = noise.update(jax.tree.map(lambda *x: sum(x), *means), noise.init(PARAMS))
    assert relative_error(naive[0], exact) > 0.02


@slow
def test_netket(monkeypatch: Any):
    """Energies are centred over the window; its gradient is the conjugate of JAX's."""
    monkeypatch.setenv("NETKET_ENABLE_X64", "0")  # otherwise its import changes jax
    nk = other("netket")
    space = nk.hilbert.Spin(0.5, 6)
    energy = nk.operator.IsingJax(space, nk.graph.Chain(6), h=1.0)
    sampler = nk.sampler.MetropolisLocal(space, n_chains=16)
    model = nk.models.RBM(alpha=1, param_dtype=np.complex64)
    run = nk.vqs.MCState(sampler, model, n_samples=64, seed=0, sampler_seed=1)
    run.parameters = jax.tree.map(lambda x: 30 * x + 0.1j, run.parameters)
    _, expected = run.expect_and_grad(energy)
    samples, local = run.samples.reshape(-1, 6), run.local_estimators(energy).ravel()
    cuts = [(0, 2), (2, 32), (32, 36), (36, 64)]

    def part(start: int, end: int) -> Any:
        weights = np.float32(np.arange(30) < end - start)
        rows = np.minimum(np.arange(start, start + 30), end - 1)
        return {"spins": samples[rows], "energy": local[rows], "weights": weights}

    window = helpers.stack([part(*cut) for cut in cuts])

    def summary_fn(params: Any, batch: Any) -> Any:
        psi = model.apply({"params": params}, batch["spins"])
        return psi, batch["energy"], batch["weights"]

    def loss_fn(summaries: Any) -> Any:
        psi, energy, weights = summaries
        n = weights.sum()
        centred = energy - jnp.sum(weights * energy) / n
        return 2 * jnp.real(jnp.sum(weights * jnp.conj(psi) * centred)) / n

    f = jax.jit(coupled_value_and_grad(summary_fn, loss_fn))
    _, got = f(run.parameters, window)

    def parts(tree: Any) -> Any:
        return [f(x) for x in jax.tree.leaves(tree) for f in (np.real, np.imag)]

    conjugate = jax.tree.map(jnp.conj, got)
    assert relative_error(parts(conjugate), parts(expected)) < 1e-5
    assert relative_error(parts(got), parts(expected)) > 0.1
    alone = [jax.tree.map(lambda x, i=i: x[i : i + 1], window) for i in range(K)]
    own = [f(run.parameters, x)[1] for x in alone]  # each with a mean of its own
    tokens = window["weights"].sum(1) / 64
    for weights in (tokens, [1 / K] * K):
        scaled = [optax.tree.scale(n, x) for n, x in zip(weights, own, strict=True)]
        summed = jax.tree.map(lambda *x: sum(x), *scaled)
        assert relative_error(parts(summed), parts(got)) > 0.02


@slow
def test_numpyro():
    """The optimizer is given the count in the traced step."""
    numpyro = other("numpyro")
    from numpyro import distributions
    from numpyro.infer import SVI, Trace_ELBO, autoguide, init_to_value

    data = whole(ROWS)
    x, y = data["x"][:18], data["y"][:18]
    cuts = [slice(0, 1), slice(1, 8), slice(8, 10), slice(10, 18)]

    def model(x: Any, y: Any) -> None:
        normal = distributions.Normal
        w = numpyro.sample("w", normal(jnp.zeros(8), 1).to_event(1))
        with numpyro.plate("data", 18, subsample_size=len(y)):
            numpyro.sample("y", normal(x @ w, 1.0), obs=y)

    start = init_to_value(values={"w": jnp.full(8, 0.1)})
    guide = autoguide.AutoDelta(model, init_loc_fn=start)

    def trained(tx: Any, cuts: Any, is_counted: bool = False) -> Any:
        svi = SVI(model, guide, tx, Trace_ELBO())
        state = svi.init(jax.random.key(0), x, y)

        @jax.jit
        def step(state: Any, x: Any, y: Any) -> Any:
            if is_counted:
                counted = with_num_tokens(tx, len(y))
                svi.optim = numpyro.optim.optax_to_numpyro(counted)
            return svi.update(state, x, y)[0]

        for cut in cuts * 2:
            state = step(state, x[cut], y[cut])
        return svi.get_params(state)["w_auto_loc"] - 0.1

    sgd = optax.sgd(1e-3)
    exact, ours = (
        trained(sgd, [slice(18)]),
        token_accumulation(sgd, K, gradients="mean"),
    )
    assert relative_error(trained(ours, cuts, is_counted=True), exact) < 1e-5
    naive = optax.MultiSteps(sgd, K).gradient_transformation()
    assert relative_error(trained(naive, cuts), exact) > 0.1
    with pytest.raises(TypeError, match="needs num_tokens"):
        trained(ours, cuts)


@slow
def test_haliax():
    """Parameters and sums have named axes; the loss and the count are arrays."""
    hax = other("haliax")
    vocabulary, width = hax.Axis("vocabulary", 32), hax.Axis("width", 16)
    axes = {"embed": (vocabulary, width), "out": (width, vocabulary)}
    axes["hidden"] = (width, width.alias("next"))
    params = {name: hax.named(x, axes[name]) for name, x in PARAMS.items()}

    def loss_fn(params: Any, batch: Any) -> Any:
        batch = {name: hax.named(x, ("row", "place")) for name, x in batch.items()}
        x = params["embed"].take("vocabulary", batch["tokens"])
        x = hax.tanh(hax.dot(x, params["hidden"], axis="width"))
        logits = hax.dot(x.rename({"next": "width"}), params["out"], axis="width")
        labels = hax.nn.one_hot(batch["labels"], vocabulary)
        losses = hax.nn.logsumexp(logits, "vocabulary")
        losses -= hax.sum(logits * labels, "vocabulary")
        return hax.sum(losses * batch["mask"]), hax.sum(batch["mask"])

    def arrays(params: Any, batch: Any) -> Any:
        return tuple(x.array for x in loss_fn(params, batch))

    got = problems.train_step(arrays, params, TEXT[0])
    assert got["out"].axes == axes["out"]
    got = {name: x.array for name, x in got.items()}
    compare(got, helpers.loss_sum_fn, PARAMS, TEXT[0])
    with pytest.raises(TypeError, match=r"got \(NamedArray, NamedArray\)"):
        problems.train_step(loss_fn, params, TEXT[0])
