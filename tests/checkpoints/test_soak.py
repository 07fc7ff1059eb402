"""A long run that is killed again and again ends as if it never had been.

`python tests/checkpoints/test_soak.py DIRECTORY PLACE` goes on from the last checkpoint
in the directory, and kills itself after this number of micro-batches.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from optax_tokenaccum import make_train_step

K, WINDOWS, KILLS = 2, 2000, 10
MICRO_BATCHES = K * WINDOWS + 1  # the last window stays open
SAVE_EVERY = 397  # not a multiple of K: every other one is in an open window


def batch_of(i: int) -> dict[str, np.ndarray]:
    """0 to 16 tokens, padded to 8 or 16."""
    rng = np.random.default_rng(i)
    tokens = rng.integers(17)
    length = 8 if tokens <= 8 else 16
    x = rng.normal(size=(length, 4)).astype(np.float32)
    return {"x": x, "mask": np.arange(length) < tokens}


def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
    x = batch["x"] * jax.random.bernoulli(rng, 0.9, batch["x"].shape)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    losses = (x @ params["head"] - batch["x"].sum(-1)) ** 2
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def run(directory: Path, place: int) -> None:
    step = make_train_step(
        loss_fn, optax.adamw(optax.cosine_decay_schedule(0.01, 1500)), K
    )
    key = jax.random.key(0)
    layers = jax.random.normal(key, (2, 4, 4)) / 2
    state = step.init({"layers": layers, "head": jnp.ones(4)})
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with (
        ocp.CheckpointManager(directory / "states", options=options) as manager,
        open(directory / "losses", "a", buffering=1) as log,
    ):
        start = manager.latest_step() or 0
        if start:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(start, args=ocp.args.StandardRestore(target))
        for done in range(start + 1, MICRO_BATCHES + 1):
            state, metrics = step(state, batch_of(done), rng=key)
            if done % K == 0:
                log.write(f"{done // K} {float(metrics.loss).hex()}\n")
            if done % SAVE_EVERY == 0 or done == MICRO_BATCHES:
                manager.save(done, args=ocp.args.StandardSave(state))
            if done == place:
                os.kill(os.getpid(), signal.SIGKILL)


def status(directory: Path, place: int = 0) -> int:
    directory.mkdir(exist_ok=True)
    words = sys.executable, __file__, str(directory), str(place)
    return subprocess.run(words, check=False, timeout=600).returncode


def end_of(directory: Path) -> Any:
    with ocp.CheckpointManager(directory / "states") as manager:
        return manager.restore(MICRO_BATCHES, args=ocp.args.StandardRestore())


@pytest.mark.slow
def test_a_soak_with_ten_kills_ends_bit_for_bit_as_without(tmp_path: Path):
    """Fails if a resumed run begins its window again, or without the old sums; if it is
    one micro-batch off in the data; and if keys are those of other micro-batches.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert status(whole) == 0
    places = sorted(random.Random(0).sample(range(1, MICRO_BATCHES), KILLS))
    assert {place % K for place in places} == {0, 1}
    for place in places:
        assert status(killed, place) == -signal.SIGKILL
    assert status(killed) == 0
    got, expected = end_of(killed), end_of(whole)
    windows = [range(i, i + K) for i in range(1, K * WINDOWS, K)]
    updates = sum(any(batch_of(i)["mask"].any() for i in x) for x in windows)
    assert expected["opt_state"]["gradient_step"] == updates
    assert expected["opt_state"]["mini_step"] == 1
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    losses, again = (path.joinpath("losses").read_text() for path in (whole, killed))
    assert len(losses.splitlines()) == WINDOWS < len(again.splitlines())
    assert {*again.splitlines()} == {*losses.splitlines()}


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
