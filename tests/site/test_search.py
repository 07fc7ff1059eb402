"""The search of the built documentation, run as the browser runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

quickjs = pytest.importorskip("quickjs", reason="it comes with the group docs")

SITE = Path(__file__).parents[2] / "site"
if not (SITE / "searchindex.js").is_file():  # Sphinx writes it last
    pytest.skip("the documentation is not built", allow_module_level=True)
STUBS = """
var window = globalThis, SPHINX_HIGHLIGHT_ENABLED = false, _ready = () => {};
var document = {getElementById: () => null, documentElement: {dataset: {}}};
var localStorage = {setItem: () => {}}, _ = (text) => text;
"""


@pytest.fixture(scope="module")
def search() -> Any:
    context = quickjs.Context()
    context.eval(STUBS)
    for script in ("language_data", "searchtools"):
        context.eval((SITE / "_static" / f"{script}.js").read_text(encoding="utf-8"))
    context.eval((SITE / "searchindex.js").read_text(encoding="utf-8"))
    return context


def pages(search: Any, query: str) -> list[str]:
    """The pages that are found, the first at the top; as in `Search.query`."""
    call = f"Search._performSearch(...Search._parseQuery({json.dumps(query)}))"
    found = json.loads(search.eval(f"JSON.stringify({call})"))
    return [page for page, *_ in reversed(found)]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("gradient accumulation", "docs/support"),
        ("bf16", "docs/support"),
        ("GRPO", "docs/losses"),
        ("KL", "docs/losses"),
        ("MultiSteps", "docs/swap"),
        ("pmap", "docs/swap"),
        ("Keras", "docs/trainers"),
        ("Orbax", "docs/training_loop"),
        ("Equinox", "docs/trainers"),
        ("clipping", "docs/optimizers"),
        ("DPO", "docs/recipes"),
        ("DP-SGD", "docs/recipes"),
        ("progress bar", "docs/training_loop"),
        ("wandb", "docs/training_loop"),
        ("contrastive", "docs/losses"),
        ("CLIP", "docs/losses"),
        ("MoE", "docs/losses"),
        ("LoRA", "docs/training_loop"),
        ("FSDP", "docs/devices"),
        ("MaxText", "docs/trainers"),
        ("memory", "docs/performance"),
        ("GPU", "docs/performance"),
        ("out of memory", "docs/performance"),
        ("OOM", "docs/performance"),
        ("ragged", "docs/ragged"),
        ("make_train_step", "docs/api"),
        ("versions", "docs/support"),
        ("images", "docs/losses"),
        ("classifier", "docs/losses"),
        ("MTP", "docs/losses"),
        ("float32 masters", "docs/optimizers"),
        ("EMA", "docs/optimizers"),
        ("requests", "docs/training_loop"),
        ("optim_step", "docs/training_loop"),
        ("global batch", "docs/devices"),
        ("pipeline", "docs/devices"),
        ("axis_rules", "docs/flax"),
        ("compilation cache", "docs/performance"),
        ("MultiStepsState", "docs/swap"),
        ("no_collectives", "docs/devices"),
        ("pinned_host", "docs/devices"),
        ("reshard_after_forward", "docs/devices"),
        ("double buffering", "docs/performance"),
        ("linear_softmax_cross_entropy_loss", "docs/performance"),
    ],
)
def test_the_right_page_comes_first(search: Any, query: str, first: str):
    assert pages(search, query)[0] == first


def test_what_is_nowhere_is_not_found(search: Any):
    assert pages(search, "zzyzx") == []
