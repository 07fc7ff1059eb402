"""Tests of `examples/finetune.py` and of the files next to it."""

import json
import os
import signal
import subprocess
import sys

import batches
import chex
import compare
import finetune
import jax
import jax.numpy as jnp
import lora
import methods
import numpy as np
import optax
import options
import planned
import pytest
import transformer
from dialogue import Pair

EXACT = {
    "MultiSteps",
    "token_accumulation",
    "make_train_step",
    "make_window_step",
    "optax.microbatching",
}
PLANNED = set(planned.PLANNED)


def ragged_sequences(number):
    """Return encoded pairs with distinct completions of 1, 4, 7... bytes."""
    return [
        batches.encode(Pair(f"prompt {i}", "x" * (1 + 3 * i))) for i in range(number)
    ]


def rows_of(*parts):
    """Return the real tokens of every row, so that padding does not matter."""
    return sorted(
        tuple(row[row != batches.PAD].tolist()) for part in parts for row in part.inputs
    )


# Batches.


@pytest.mark.parametrize(
    "pair",
    [Pair("What?", "That."), Pair("é", "naïve ✓"), Pair("long prompt", "y")],
    ids=["ascii", "utf8", "one byte"],
)
def test_the_loss_covers_the_completion_and_its_end(pair):
    inputs, labels, mask = batches.encode(pair)
    completion = [*pair.completion.encode(), batches.EOS]
    prompt = [*pair.prompt.encode(), batches.SEP]
    assert inputs.tolist() == [batches.BOS, *prompt, *completion[:-1]]
    assert labels[:-1].tolist() == inputs[1:].tolist()
    assert labels[mask].tolist() == completion
    assert labels[~mask].tolist() == prompt


def test_padding_takes_the_first_length_that_fits_and_bears_no_loss():
    sequences = ragged_sequences(4)
    lengths = [len(sequences[1].inputs), len(sequences[2].inputs), 99]
    assert batches.pad(sequences[:2], lengths).inputs.shape == (2, lengths[0])
    batch = batches.pad(sequences[1:3], lengths, rows=5)
    assert [part.shape for part in batch] == [(5, lengths[1])] * 3
    for row, sequence in enumerate(sequences[1:3]):
        n = len(sequence.inputs)
        for padded, values in zip(batch, sequence, strict=True):
            np.testing.assert_array_equal(padded[row, :n], values)
        assert (batch.inputs[row, n:] == batches.PAD).all()
        assert not batch.mask[row, n:].any()
    assert (batch.inputs[2:] == batches.PAD).all()
    assert not batch.mask[2:].any()


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_are_filled_with_such_as_bear_no_loss(rows):
    batch = batches.pad(ragged_sequences(rows), [99])
    filled = batches.fill_rows(batch, 4)
    assert [len(part) for part in filled] == [4 if rows < 5 else 8] * 3
    for part, given in zip(filled, batch, strict=True):
        np.testing.assert_array_equal(part[:rows], given)
        assert part.dtype == given.dtype
    assert (filled.inputs[rows:] == batches.PAD).all()
    assert not filled.mask[rows:].any()


def test_windows_cut_the_same_rows_in_two_ways_and_leave_none_out():
    sequences = ragged_sequences(12)

    def make(seed):
        return batches.make_windows(
            sequences,
            updates=4,
            accumulation_steps=3,
            micro_batch_size=2,
            lengths=[30, 60],
            seed=seed,
        )

    windows = make(0)
    for window in windows:
        assert [len(batch.inputs) for batch in window.micro_batches] == [2, 2, 2]
        assert rows_of(*window.micro_batches) == rows_of(window.whole)
        rows = [tuple(sequence.inputs.tolist()) for sequence in window.sequences]
        assert sorted(rows) == rows_of(window.whole)
        assert window.stacked.inputs.shape[:2] == (3, 2)
        for i, batch in enumerate(window.micro_batches):
            length = batch.inputs.shape[1]
            for parts, part in zip(window.stacked, batch, strict=True):
                np.testing.assert_array_equal(parts[i, :, :length], part)
            assert not window.stacked.mask[i, :, length:].any()
    everything = sorted(tuple(sequence.inputs.tolist()) for sequence in sequences)
    epochs = [windows[:2], windows[2:]]
    for epoch in epochs:
        assert rows_of(*(window.whole for window in epoch)) == everything
    assert rows_of(epochs[0][0].whole) != rows_of(epochs[1][0].whole)
    chex.assert_trees_all_equal(windows, make(0))
    assert rows_of(make(1)[0].whole) != rows_of(windows[0].whole)


# Model.


@pytest.fixture(scope="module")
def params():
    return transformer.init(
        jax.random.key(0), vocabulary=batches.VOCABULARY, d_model=32, layers=2
    )


def test_a_later_token_does_not_change_earlier_logits(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 256)
    before = transformer.forward(params, tokens)
    after = transformer.forward(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    difference = jnp.abs(before - after).max(axis=(0, 2))
    assert (difference[7:] > 1e-3).all(), "a token must reach itself and all after it"


def test_positions_matter():
    # One layer: a second one would reveal the order at the last position without them.
    params = transformer.init(jax.random.key(0), vocabulary=9, d_model=32, layers=1)
    tokens = jnp.array([[5, 6, 7, 8], [6, 5, 7, 8]])
    first, second = transformer.forward(params, tokens)[:, -1]
    assert jnp.abs(first - second).max() > 1e-4


def test_padding_changes_nothing_at_the_real_positions(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    padded = jnp.pad(tokens, ((0, 0), (0, 20)), constant_values=batches.PAD)
    np.testing.assert_allclose(
        transformer.forward(params, padded)[:, :12],
        transformer.forward(params, tokens),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_split_is_judged_by_its_tokens_not_by_its_batches(params):
    sequences = ragged_sequences(7)
    cut = batches.batches_in_order(sequences, rows=3, lengths=[20, 40])
    whole = batches.pad(sequences, [40])
    assert len(cut) == 3
    loss_fn = jax.jit(compare.loss_fn)
    sums = [loss_fn(params, batch, {}) for batch in cut]
    loss_sum, num_tokens = loss_fn(params, whole, {})
    assert num_tokens == sum(int(sequence.mask.sum()) for sequence in sequences)
    exact = float(loss_sum / num_tokens)
    naive = float(np.mean([loss / n for loss, n in sums]))
    assert compare.mean_loss(params, {}, cut) == pytest.approx(exact, rel=1e-5)
    assert abs(naive - exact) > 1e-3 * exact


# Adapters.


@pytest.mark.parametrize("rank", [1, 4])
def test_an_adapter_adds_the_scaled_product_of_its_matrices(params, rank):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    trained = lora.init_adapters(jax.random.key(2), params, rank)
    before = transformer.forward(params, tokens)
    with_adapters = transformer.forward(lora.merge(trained, params), tokens)
    np.testing.assert_array_equal(with_adapters, before)

    adapters = trained["layers"]["adapters"]
    assert set(adapters) == {"qkv", "out", "up", "down"}
    matrices = {}
    for name, adapter in adapters.items():
        adapter["b"] = 0.1 * jax.random.normal(jax.random.key(3), adapter["b"].shape)
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(*adapter.values())
        matrices[name] = params["layers"][name] + 16 / rank * product
    with_adapters = transformer.forward(lora.merge(trained, params), tokens)
    dense = params | {"layers": params["layers"] | matrices}
    np.testing.assert_allclose(
        with_adapters, transformer.forward(dense, tokens), rtol=1e-4, atol=1e-4
    )
    assert jnp.abs(with_adapters - before).max() > 0.1


def drive(loop):
    """Return the parameters after each update, and the programs of the loop."""
    updates = []
    while True:
        try:
            updates.append(jax.tree.map(np.array, next(loop)))
        except StopIteration as stop:
            return updates, stop.value


@pytest.mark.slow
def test_adapters_alone_are_trained_summed_and_kept_by_every_method():
    setting = options.parse_options(
        ["--lora-rank=2", "--d-model=32", "--layers=2", "--micro-batch-size=2"]
    )
    params, frozen = finetune.make_parameters(setting)
    k, rows, length = 4, 2, 48
    windows = batches.make_windows(
        4 * ragged_sequences(12)[::6],  # two lengths, so that few shapes are compiled
        updates=3,
        accumulation_steps=k,
        micro_batch_size=rows,
        lengths=[length],
        seed=0,
    )
    inner = optax.sgd(0.1, momentum=0.9)  # its state is as large as `params`
    updates, programs = {}, {}
    loops = methods.METHODS | planned.PLANNED
    for method in {"full-batch", "optax.MultiSteps"} | EXACT | PLANNED:
        updates[method], programs[method] = drive(
            loops[method](jax.tree.map(jnp.copy, params), frozen, windows, inner, k)
        )

    chex.assert_trees_all_equal(frozen, finetune.make_parameters(setting)[1])
    before = lora.merge(params, frozen)
    after = lora.merge(updates["full-batch"][-1], frozen)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    for path, has_changed in jax.tree.leaves_with_path(changed):
        assert has_changed == ("adapters" in jax.tree_util.keystr(path)), path

    def distance(method):
        reference = updates["full-batch"][-1]
        difference = jax.tree.map(np.subtract, updates[method][-1], reference)
        return optax.tree.norm(difference) / optax.tree.norm(reference)

    naive = distance("optax.MultiSteps")
    for method in EXACT | PLANNED:
        assert distance(method) < 1e-5, method
        assert naive > max(100 * distance(method), 1e-4), method

    # Arguments of the adapters' size, in addition to batch and frozen: parameters,
    # momentum and, if it persists between calls, the sum.
    copies = {
        "full-batch": {"train_step": 2},
        "optax.MultiSteps": {"train_step": 3},
        "MultiSteps": {"train_step": 3},
        "token_accumulation": {"train_step": 3},
        "make_train_step": {"accumulate": 2, "close_window": 3},
        "make_window_step": {"window_step": 2},
        "optax.microbatching": {"train_step": 2},
        "planned train step": {"accumulate": 2, "close_window": 3},
        "planned window step": {"window_step": 2},
    }
    settings = batches.plan_settings(windows)
    assert settings["max_tokens"] == rows * length
    planned_batch = 3 * max(
        settings["max_tokens"] // n * n for n in settings["length_buckets"]
    )
    adapters, base = optax.tree.size(params), optax.tree.size(frozen)
    assert base > 4 * adapters
    for method in updates:
        assert set(programs[method]) == set(copies[method])
        whole = method in {"full-batch", "make_window_step", "optax.microbatching"}
        batch = 3 * rows * length * (k if whole else 1)
        if method == "planned train step":
            batch = planned_batch
        elif method == "planned window step":  # with a count for every shape
            shapes = settings["length_buckets"]
            room = -(-k * rows // (settings["max_tokens"] // shapes[-1]))
            batch = planned_batch * room + len(shapes)
        for name, program in programs[method].items():
            given = sum(
                int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(program.args_info)
            )
            if name != "close_window":
                given -= batch + base
                # Compiled programs drop arguments that they do not read.
                read = program.compile().memory_analysis().argument_size_in_bytes
                assert read > 4 * base, (method, name)
            scalars = given - copies[method][name] * adapters
            assert 0 <= scalars < 10, (method, name)


# The command.


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--updates", "0", "must be a whole number >= 1, got '0'"),
        ("--micro-batch-size", "1.5", "must be a whole number >= 1, got '1.5'"),
        ("--gradient-accumulation-steps", "-2", ">= 1, got '-2'"),
        ("--learning-rate", "nan", "must be a number above 0, got 'nan'"),
        ("--learning-rate", "0", "must be a number above 0, got '0'"),
        ("--d-model", "48", "must be a multiple of 32 (the width of a head), got 48"),
        ("--lora-rank", "-4", "must be a whole number >= 0, got '-4'"),
        ("--seed", "-1", "must be a whole number >= 0, got '-1'"),
        ("--save-every", "0", "must be a whole number >= 1, got '0'"),
        ("--methods", "adam", "invalid choice: 'adam'"),
        ("--optimizer", "lion", "invalid choice: 'lion'"),
    ],
)
def test_bad_values_are_refused(capsys, flag, value, message):
    with pytest.raises(SystemExit) as error:
        options.parse_options([f"{flag}={value}"])
    assert error.value.code == 2
    complaint = " ".join(capsys.readouterr().err.split())
    assert f"argument {flag}: " in complaint
    assert message in complaint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save-every=3"], "--save-every needs a --checkpoint-dir"),
        (["--checkpoint-dir=x", "--methods", "MultiSteps"], "--methods is of the"),
        (["--checkpoint-dir=x", "--out=y"], "--out is of the comparison"),
        (["--checkpoint-dir=x", "--plan"], "--plan is of the comparison"),
        (["--gradient-noise", "--plan"], "random micro-batches: leave --plan out"),
        (["--gradient-noise", "--methods", "MultiSteps"], "leave --methods out"),
        (["--gradient-noise", "--checkpoint-dir=x"], "leave --checkpoint-dir out"),
        (
            ["--gradient-noise", "--gradient-accumulation-steps=1"],
            "give --gradient-accumulation-steps of 2 or more",
        ),
        (["--distributed"], "several processes train a single run"),
        (["--checkpoint-dir=x", "--process-id=0"], "--process-id go together"),
        (
            ["--checkpoint-dir=x", "--coordinator=h:1", "--num-processes=2"]
            + ["--process-id=2"],
            "--process-id must be below --num-processes 2, got 2",
        ),
    ],
    ids=["save-every alone", "methods", "out", "plan"]
    + ["noise of a plan", "noise of methods", "noise of a run", "noise of one"]
    + ["distributed alone", "process-id alone", "process-id"],
)
def test_flags_that_do_not_go_together_are_refused(capsys, words, message):
    with pytest.raises(SystemExit) as error:
        options.parse_options(words)
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def run_command(*words):
    return subprocess.run(
        [sys.executable, finetune.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n', "line 1: 'completion' must be a text"),
        ("\n", "data.jsonl is empty"),
    ],
    ids=["no completion", "empty"],
)
def test_bad_data_ends_the_command_without_a_traceback(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    result = run_command("--data", file, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def interrupted_after(line, *words, **variables):
    """Send SIGINT after a line of output; return what the command prints then."""
    with subprocess.Popen(
        [sys.executable, finetune.__file__, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    ) as process:
        assert line in process.stdout
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    return complaint


def test_ctrl_c_ends_the_command_before_jax_is_imported(tmp_path):
    (tmp_path / "jax.py").write_text(
        "import time\nprint(1, flush=True)\ntime.sleep(60)"
    )
    complaint = interrupted_after("1\n", PYTHONPATH=str(tmp_path))
    assert complaint == "interrupted before it began\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_comparison_with_one_line(tmp_path):
    small = "--updates=1", "--d-model=32", "--layers=1"
    complaint = interrupted_after("compiling: full-batch\n", *small, "--out", tmp_path)
    assert complaint == (
        "interrupted: only --checkpoint-dir makes a run that resumes, the same command "
        "starts from the beginning\n"
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora_rank", "words", "exact"),
    [
        (0, ["--plan"], EXACT | PLANNED),
        (
            2,
            ["--methods", "optax.MultiSteps", "make_window_step"],
            {"make_window_step"},
        ),
    ],
    ids=["full", "lora"],
)
def test_exact_methods_follow_the_full_batch_and_the_mean_of_means_does_not(
    tmp_path, lora_rank, words, exact
):
    result = run_command(
        *("--optimizer", "sgd", "--updates", 6, "--max-length", 64, "--d-model", 32),
        *("--layers", 1, "--gradient-accumulation-steps", 8, "--out", tmp_path / "out"),
        *("--lora-rank", lora_rank, *words),
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {row.pop("method"): row for row in content["table"]}
    assert set(rows) == exact | {"full-batch", "optax.MultiSteps"}
    naive = rows["optax.MultiSteps"]["distance"]
    for method in exact:
        distance = rows[method]["distance"]
        assert distance < 1e-5, method
        assert naive > max(100 * distance, 1e-4), method
    for method, row in rows.items():
        curve = content["curves"][method]
        assert len(curve["distance"]) == 6
        assert curve["distance"][-1] == row["distance"]
        losses = [loss for _, loss in curve["validation_loss"]]
        assert losses[-1] == row["validation_loss"] < losses[0]
        assert row["tokens_per_second"] > 0
        assert all(size > 0 for size in row["memory_bytes"].values())
        for activity in ("compiling", "training", "measuring"):
            assert result.stdout.count(f"{activity}: {method}\n") == 1
    assert content["settings"]["optimizer"] == "sgd"
    assert content["settings"]["lora_rank"] == lora_rank
    assert ("planned: " in result.stdout) == ("--plan" in words)
    trained, frozen = content["parameters"]["trained"], content["parameters"]["frozen"]
    assert frozen > 4 * trained > 0 if lora_rank else trained > frozen == 0
    assert set(content["versions"]) == {"python", "jax", "optax"}
    picture = (tmp_path / "out" / "finetune.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 2], ids=["full", "lora"])
def test_the_noise_is_measured_over_the_run(tmp_path, lora_rank):
    result = run_command(
        *("--gradient-noise", "--updates", 60, "--max-length", 64, "--d-model", 32),
        *("--layers", 1, "--gradient-accumulation-steps", 4, "--out", tmp_path),
        *("--lora-rank", lora_rank),
    )
    assert result.returncode == 0, result.stderr
    printed = " ".join(result.stdout.split())
    for third in ("updates 1 to 20", "updates 21 to 40", "updates 41 to 60"):
        assert f"{third}: loss " in printed
    assert "; noise scale " in printed and "docs/how_many_tokens.md." in printed
    assert [path.name for path in tmp_path.iterdir()] == ["noise.png"]
    picture = (tmp_path / "noise.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
