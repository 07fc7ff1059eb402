"""Every row of docs/bad_input.md: make the mistake, and compare the message."""

import pathlib
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import mistakes_in_arguments
import mistakes_in_planning
import mistakes_in_reductions
import mistakes_with_devices
import mistakes_with_flax
import mistakes_with_programs
import mistakes_with_states
import pytest
from mistakes import BATCH, PARAMS, SGD, train_step

from optax_tokenaccum import token_accumulation

ROWS = [
    *mistakes_in_arguments.BUILDING,
    *mistakes_in_arguments.UPDATING,
    *mistakes_with_states.CARRYING,
    *mistakes_with_states.STEPPING,
    *mistakes_in_reductions.REDUCING,
    *mistakes_in_planning.PLANNING,
    *mistakes_with_devices.ON_DEVICES,
    *mistakes_with_programs.READING,
    *mistakes_with_flax.WITH_FLAX,
]
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "bad_input.md"


def rows_of_the_page() -> dict[str, str]:
    """Map every mistake to the message that the page shows."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in lines[1:]]
    assert {len(row) for row in cells} == {3}
    return {mistake: seen for mistake, seen, _ in cells}


def as_pattern(seen: str) -> str:
    """Match code exactly, and an ellipsis with any text."""
    return ".*".join(map(re.escape, seen.strip("`").split("…")))


def is_alive(tree: Any) -> bool:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return not any(x.is_deleted() for x in arrays)


def test_every_row_is_tested_and_every_mistake_has_a_row():
    mistakes = [mistake for mistake, _, _ in ROWS]
    assert mistakes == list(rows_of_the_page())


@pytest.mark.parametrize(
    ("row", "error", "make"),
    [
        pytest.param(row, error, make, id=f"{row.replace('`', '')}-{i}")
        for row, error, ways in ROWS
        for i, make in enumerate(ways)
    ],
)
def test_message_is_that_of_the_page_and_nothing_is_lost(
    row: str, error: type[Exception] | None, make: Any
):
    seen, kept = rows_of_the_page()[row], [PARAMS]

    def keep(state: Any) -> Any:
        kept.append(state)
        return state

    if error is None:  # `make` itself asserts what happens instead
        assert seen.startswith("No error: ")
        make(keep)
        return
    with pytest.raises(error) as raised:
        make(keep)
    message = f"{raised.type.__name__}: {raised.value}"
    assert re.fullmatch(as_pattern(seen), message, re.DOTALL), message
    assert is_alive(kept)


@pytest.mark.parametrize("k", [2, lambda _: 2], ids=["two programs", "one program"])
def test_after_an_error_the_same_window_goes_on(k: Any):
    step = train_step(SGD, k)
    state = step.init(PARAMS)
    state, _ = step(state, BATCH)
    for batch, more in ((BATCH, {"unknown": 1}), ({"x": BATCH}, {})):
        with pytest.raises(TypeError):
            step(state, batch, **more)
    state, metrics = step(state, 3 * BATCH)
    assert metrics.updated and float(metrics.num_tokens) == 8.0
    chex.assert_trees_all_equal(state.params, PARAMS | {"w": jnp.full(3, -2.0)})


def test_an_init_that_reads_values_is_no_reason_to_refuse_its_state():
    def init(params: Any) -> Any:
        return {"sign": jnp.sign(float(params["w"][0]))}

    inner = SGD._replace(init=init, update=lambda g, state, params=None: (g, state))
    optimizer = token_accumulation(inner, 1)
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, num_tokens=1)
    chex.assert_trees_all_equal(updates, PARAMS)
