"""The recipe of `docs/trainers.md` for Keras, with the real `fit` of Keras 3.15."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras_token_mean import TokenMean

PAGE = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text()
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
ACCUMULATE = {"gradient_accumulation_steps": K}


class Model(TokenMean, keras.Model):
    k = K


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, where 0 is padding, labels, and a weight for each token."""
    batch = helpers.ragged_batch(0, rows)
    mask = batch["mask"]
    tokens = np.where(mask, 1 + batch["tokens"] % (helpers.VOCABULARY - 1), 0)
    return tokens, batch["labels"], mask.astype(np.float32)


def tensors(mask_zero: bool = False, regularizers: Any = None) -> tuple[Any, Any]:
    """Return the input and the output of a small model, the same in every call."""
    keras.utils.set_random_seed(0)
    size, width = helpers.VOCABULARY, helpers.WIDTH
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(size, width, mask_zero=mask_zero)(inputs)
    x = layers.Dense(width, activation="tanh", **(regularizers or {}))(x)
    return inputs, layers.Dense(size)(x)


def new_loss(reduction: str = "mean_with_sample_weight", **options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **options
    )


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(1.0, **options)


def new(
    model_class: Any,
    optimizer: Callable[..., Any] = sgd,
    accumulate: bool = False,
    loss: Any = None,
    compiled: Any = None,
    **options: Any,
) -> Any:
    model = model_class(*tensors(**options))
    optimizer = optimizer(**(ACCUMULATE if accumulate else {}))
    model.compile(optimizer, loss=loss or new_loss(), **(compiled or {}))
    return model


def values(variables: Any) -> list[np.ndarray]:
    return [np.array(v.value) for v in variables]


def fit(model: Any, *arrays: Any, batch_size: int = ROWS, **options: Any) -> Any:
    """Train; return how far the parameters moved, and the history."""
    x, y, weights = (*arrays, None)[:3]
    before = values(model.trainable_variables)
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        **options,
    ).history
    return helpers.difference(before, values(model.trainable_variables)), history


def three_ways(
    *arrays: Any, batch_size: int = ROWS, epochs: int = 1, **options: Any
) -> tuple[float, float]:
    """Return the distances of accumulation as shipped, and of ours, to a full batch."""
    sizes = batch_size, batch_size // K, batch_size
    models = (keras.Model, keras.Model, Model)
    full, naive, ours = (
        fit(
            new(model_class, accumulate=size < batch_size, **options),
            *arrays,
            batch_size=size,
            epochs=epochs,
        )[0]
        for model_class, size in zip(models, sizes, strict=True)
    )
    return helpers.relative_error(naive, full), helpers.relative_error(ours, full)


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


@pytest.mark.parametrize(
    ("reduction", "mask_zero"),
    [
        ("sum_over_batch_size", True),
        ("sum_over_batch_size", False),
        ("mean_with_sample_weight", True),
    ],
    ids=["default", "default, weights", "mean"],
)
def test_what_each_reduction_divides_by(reduction: str, mask_zero: bool):
    arrays = data()[: 2 if mask_zero else 3]

    def gradient(size: int, reduction: str = reduction) -> Any:
        options = {"loss": new_loss(reduction), "mask_zero": mask_zero}
        model = new(keras.Model, accumulate=size < ROWS, **options)
        return fit(model, *arrays, batch_size=size)[0]

    error = helpers.relative_error(gradient(ROWS // K), gradient(ROWS))
    if mask_zero:
        assert f"off by {percent(error)}" in TEXT and error > 0.1
        return
    mean = gradient(ROWS, "mean_with_sample_weight")
    off = percent(helpers.relative_error(gradient(ROWS), mean))
    assert error < RTOL and f"{off} off the token mean" in TEXT


@pytest.mark.parametrize("given", ["mask", "weights", "mask and weights", "ignored"])
def test_masks_and_weights_of_tokens(given: str):
    x, y, weights = data()
    arrays, options = [x, y], {"mask_zero": "mask" in given}
    if "weights" in given:  # not only zeros and ones
        arrays.append(weights * np.linspace(0.5, 2, LENGTH, dtype=np.float32))
    if given == "ignored":
        arrays[1] = np.where(weights > 0, y, -1)
        options["loss"] = new_loss(ignore_class=-1)
    naive, ours = three_ways(*arrays, **options)
    assert ours < RTOL
    assert naive > 0.1


@pytest.mark.parametrize("rows", [8, 7, 3, 1])
def test_weights_of_rows(rows: int):
    """Rows that `k` divides, that it does not, and fewer than `k`."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 5)), rng.normal(size=(rows, 2))
    weights = rng.uniform(size=rows) ** 4

    class Sequential(TokenMean, keras.Sequential):
        k = K

    def move(model_class: Any, batch_size: int, **options: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = model_class([keras.Input((5,)), layers.Dense(2)])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(sgd(**options), loss)
        return fit(model, x, y, weights, batch_size=batch_size)[0]

    full = move(keras.Sequential, rows)
    assert helpers.relative_error(move(Sequential, rows), full) < RTOL
    naive = move(keras.Sequential, -(-rows // K), **ACCUMULATE)
    assert helpers.relative_error(naive, full) > 0.1


def adamw(**options: Any) -> Any:
    return keras.optimizers.AdamW(0.01, **options)


def adamw_with_average(**options: Any) -> Any:
    return adamw(use_ema=True, ema_momentum=0.5, **options)


@pytest.mark.parametrize("optimizer", [adamw, adamw_with_average])
def test_several_windows_the_last_of_them_partial(optimizer: Any):
    """The last has 7 rows, in micro-batches of 2, 2, 2 and 1."""
    rows = 3 * ROWS - 1
    naive, ours = three_ways(*data(rows), optimizer=optimizer, mask_zero=True, epochs=2)
    assert ours < RTOL
    assert naive > 0.1


def test_a_window_without_tokens():
    x, y, weights = data()
    for model_class in (keras.Model, Model):
        move, history = fit(new(model_class), x, y, 0 * weights)
        assert not any(np.any(leaf) for leaf in move)
        assert history["loss"] == [0]


def test_devices():
    """Two windows, the last of 8 rows: micro-batches with fewer rows than devices."""
    assert len(jax.devices()) == 8
    arrays = data(40)
    options = {"optimizer": adamw, "mask_zero": True}
    full, _ = fit(new(keras.Model, **options), *arrays, batch_size=32)
    moves = []
    with keras.distribution.DataParallel(devices=jax.devices()).scope():
        for model_class, size in ((keras.Model, 32 // K), (Model, 32)):
            model = new(model_class, accumulate=size < 32, **options)
            assert len(model.variables[0].value.devices()) == 8
            moves.append(fit(model, *arrays, batch_size=size)[0])
    naive, ours = (helpers.relative_error(move, full) for move in moves)
    assert ours < RTOL
    assert naive > 0.1


def test_weight_regularization_is_exact():
    l2 = {"kernel_regularizer": keras.regularizers.L2(0.1)}
    naive, ours = three_ways(*data()[:2], mask_zero=True, regularizers=l2)
    assert ours < RTOL
    assert naive > 0.01


def still(**options: Any) -> Any:
    return keras.optimizers.SGD(0.0, **options)


def test_what_is_logged():
    """The loss is the token mean of the epoch; metrics leave out what is masked."""
    x, y, _ = data(3 * ROWS - 1)
    compiled = {"metrics": ["accuracy"]}
    logs = {}
    for model_class in (keras.Model, Model):
        model = new(model_class, still, mask_zero=True, compiled=compiled)
        for variable in model.trainable_variables:  # so that losses differ
            variable.assign(10 * variable)
        _, logs[model_class] = fit(model, x, y)
        expected = model.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)
    (loss,), (accuracy,) = logs[Model]["loss"], logs[Model]["accuracy"]
    assert loss == pytest.approx(expected["loss"], rel=RTOL)
    assert accuracy == pytest.approx(expected["accuracy"], rel=RTOL)
    shipped = logs[keras.Model]
    assert shipped["loss"][0] != pytest.approx(expected["loss"], rel=1e-3)
    assert shipped["accuracy"][0] != pytest.approx(expected["accuracy"], rel=1e-3)


ACTIVITY = {"activity_regularizer": keras.regularizers.L2(0.1)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: new(Model, accumulate=True), "optimizer must not: got .*steps=4"),
        (lambda: new(Model, loss=new_loss("sum")), "mean_with_sample_weight"),
        (
            lambda: new(Model, loss="sparse_categorical_crossentropy"),
            "got sparse_categorical_crossentropy",
        ),
        (lambda: new(Model, regularizers=ACTIVITY), "add_loss or of an activity"),
    ],
    ids=["accumulates twice", "reduction", "by name", "activity"],
)
def test_errors(build: Any, message: str):
    model = build()
    with pytest.raises(ValueError, match=message):
        fit(model, *data())


def test_several_outputs_raise():
    inputs = keras.Input((3,))
    model = Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(sgd(), loss)
    x, y = np.ones((4, 3)), np.ones((4, 1))
    with pytest.raises(ValueError, match="one output"):
        model.fit(x, [y, y], verbose=0)


def test_the_page_is_about_this_version():
    assert f"/keras) {keras.__version__} trains" in TEXT
