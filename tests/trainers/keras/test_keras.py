"""The recipe of `docs/trainers.md` for Keras, with the real `fit` of Keras 3.15."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest

keras = pytest.importorskip("keras", "3.15.1", reason="its own environment has Keras")

from keras import layers
from keras_token_mean import TokenMean

PAGE = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text()
(SECTION,) = re.findall(r"^## Keras\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
TEXT = " ".join(SECTION.split())
(FIXED,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
AS_SHIPPED = """
model = keras.Model(inputs, outputs)
model.compile(
    keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, batch_size=2)
"""

K, ROWS, LENGTH = 4, 8, helpers.MAX_LENGTH
RTOL = helpers.RTOL["float32"]
L2 = keras.regularizers.L2(0.1)
sgd = functools.partial(keras.optimizers.SGD, 1.0)
adamw = functools.partial(keras.optimizers.AdamW, 0.01, use_ema=True, ema_momentum=0.5)


class Model(TokenMean, keras.Model):
    k = K


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, where 0 is padding, labels, and a weight for each token."""
    batch = helpers.ragged_batch(0, rows)
    mask = batch["mask"]
    tokens = np.where(mask, 1 + batch["tokens"] % (helpers.VOCABULARY - 1), 0)
    return tokens, batch["labels"], mask.astype(np.float32)


def tensors(
    mask_zero: bool = False, regularizers: Any = None, outputs: int = 1
) -> tuple[Any, Any]:
    """Return the input and the output of a small model, the same in every call."""
    keras.utils.set_random_seed(0)
    size, width = helpers.VOCABULARY, helpers.WIDTH
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(size, width, mask_zero=mask_zero)(inputs)
    x = layers.Dense(width, activation="tanh", **(regularizers or {}))(x)
    output = layers.Dense(size)(x)
    return inputs, output if outputs == 1 else [output] * outputs


def new_loss(reduction: str = "mean_with_sample_weight", **options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **options
    )


def new(
    model_class: Any,
    optimizer: Callable[..., Any] = sgd,
    loss: Any = None,
    metrics: Any = None,
    k: int = 1,
    **options: Any,
) -> Any:
    model = model_class(*tensors(**options))
    accumulate = {"gradient_accumulation_steps": k} if k > 1 else {}
    model.compile(optimizer(**accumulate), loss or new_loss(), metrics=metrics)
    return model


def values(variables: Any) -> list[np.ndarray]:
    return [np.array(v.value) for v in variables]


def fit(model: Any, x: Any, y: Any, weights: Any = None, batch_size: int = ROWS) -> Any:
    """Train; return how far the parameters moved, and the history."""
    before = values(model.trainable_variables)
    given = {"sample_weight": weights, "batch_size": batch_size}
    history = model.fit(x, y, shuffle=False, verbose=0, **given).history
    return helpers.difference(before, values(model.trainable_variables)), history


def percent(x: float) -> str:
    return f"{x:.0%}".replace("%", " %")


def test_the_block_of_the_page():
    x, y, _ = data()
    moves = []
    for block in (AS_SHIPPED, FIXED):
        assert block.count("AdamW(1e-3") == 1
        block = block.replace("AdamW(1e-3", "SGD(1.0").replace(
            "model.fit(x, y,",
            "before = values(model.trainable_variables)\n"
            "model.fit(x, y, shuffle=False, verbose=0,",
        )
        inputs, outputs = tensors(mask_zero=True)
        names: dict[str, Any] = {"keras": keras, "values": values}
        names |= {"inputs": inputs, "outputs": outputs, "x": x, "y": y}
        exec(compile(block, "docs/trainers.md", "exec"), names)
        after = values(names["model"].trainable_variables)
        moves.append(helpers.difference(names["before"], after))
    full, _ = fit(new(keras.Model, mask_zero=True), x, y)
    naive, ours = (helpers.relative_error(move, full) for move in moves)
    assert ours < RTOL
    lengths = (x > 0).sum(1)
    assert f"{ROWS} rows of {lengths.min()} to {lengths.max()} tokens" in TEXT
    assert f"off by {percent(naive)}" in TEXT and naive > 0.1
    assert ours < 4e-7


def test_the_default_reduction_with_weights_divides_by_all_elements():
    divided, by_weights = (
        fit(new(keras.Model, loss=new_loss(reduction)), *data())[0]
        for reduction in ("sum_over_batch_size", "mean_with_sample_weight")
    )
    off = percent(helpers.relative_error(divided, by_weights))
    assert f"{off} off the token mean" in TEXT


@pytest.mark.parametrize("given", ["mask and weights", "ignored and regularized"])
def test_masks_and_weights_of_tokens(given: str):
    x, y, weights = data()
    arrays, options = [x, y], {"mask_zero": "mask" in given}
    if "weights" in given:  # not only zeros and ones
        arrays.append(weights * np.linspace(0.5, 2, LENGTH, dtype=np.float32))
    else:
        arrays[1] = np.where(weights > 0, y, -1)
        options["loss"] = new_loss(ignore_class=-1)
        options["regularizers"] = {"kernel_regularizer": L2}
    full, naive, ours = (
        fit(new(kind, k=k, **options), *arrays, batch_size=ROWS // k)[0]
        for kind, k in ((keras.Model, 1), (keras.Model, K), (Model, 1))
    )
    assert helpers.relative_error(ours, full) < RTOL
    assert helpers.relative_error(naive, full) > 0.01


@pytest.mark.parametrize("rows", [7, 3])
def test_weights_of_rows(rows: int):
    """Rows that `k` does not divide, and fewer than `k`."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 5)), rng.normal(size=(rows, 2))
    weights = rng.uniform(size=rows) ** 4

    class Sequential(TokenMean, keras.Sequential):
        k = K

    moves = []
    for kind, k in ((keras.Sequential, 1), (keras.Sequential, K), (Sequential, 1)):
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((5,)), layers.Dense(2)])
        accumulate = {"gradient_accumulation_steps": k} if k > 1 else {}
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(sgd(**accumulate), loss)
        moves.append(fit(model, x, y, weights, batch_size=-(-rows // k))[0])
    full, naive, ours = moves
    assert helpers.relative_error(ours, full) < RTOL
    assert helpers.relative_error(naive, full) > 0.1


def test_a_window_without_tokens():
    x, y, weights = data()
    move, history = fit(new(Model), x, y, 0 * weights)
    assert not any(np.any(leaf) for leaf in move)
    assert history["loss"] == [0]


def test_devices():
    """Two windows, the last of 8 rows: micro-batches with fewer rows than devices."""
    assert len(jax.devices()) == 8
    arrays = data(40)
    options = {"optimizer": adamw, "mask_zero": True}
    full, _ = fit(new(keras.Model, **options), *arrays, batch_size=32)
    with keras.distribution.DataParallel(devices=jax.devices()).scope():
        model = new(Model, **options)
        assert len(model.variables[0].value.devices()) == 8
        ours, _ = fit(model, *arrays, batch_size=32)
    assert helpers.relative_error(ours, full) < RTOL


def test_what_is_logged():
    """The loss is the token mean of the epoch; metrics leave out what is masked."""
    x, y, _ = data(2 * ROWS - 1)
    still = functools.partial(keras.optimizers.SGD, 0.0)
    model = new(Model, still, metrics=["accuracy"], mask_zero=True)
    for variable in model.trainable_variables:  # so that losses differ
        variable.assign(10 * variable)
    _, logs = fit(model, x, y)
    all_rows, half = (
        model.evaluate(x[:n], y[:n], batch_size=n, verbose=0, return_dict=True)
        for n in (len(x), ROWS)
    )
    for name in "loss", "accuracy":
        assert logs[name] == [pytest.approx(all_rows[name], rel=RTOL)]
        assert half[name] != pytest.approx(all_rows[name], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": K}, "optimizer must not: got .*steps=4"),
        ({"loss": new_loss("sum")}, "mean_with_sample_weight"),
        ({"loss": "sparse_categorical_crossentropy"}, "got sparse_categorical"),
        ({"regularizers": {"activity_regularizer": L2}}, "add_loss or of an activity"),
        ({"outputs": 2}, "one output"),
    ],
)
def test_errors(options: Any, message: str):
    model, (x, y, _) = new(Model, **options), data()
    with pytest.raises(ValueError, match=message):
        fit(model, x, [y, y] if "outputs" in options else y)


def test_the_page_is_about_this_version():
    assert f"/keras) {keras.__version__} trains" in TEXT
