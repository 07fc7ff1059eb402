"""Imports between the package's folders only go down, through at most seven levels."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "optax_tokenaccum"
# The folders that each folder may import from. Files at the root may import from all.
BELOW = {
    "_core": set(),
    "_devices": {"_core"},
    "_ragged": {"_core"},
    "_audit": {"_core"},
    "_compiled": set(),
    "_steps": {"_core", "_devices", "_ragged", "_compiled"},
    "_nnx": {"_core", "_devices", "_steps"},
}
FLOORS = 7
# What needs an extra, and the public module that may import it.
EXTRAS = {"nnx": "flax", "_nnx": "flax", "linen": "flax", "grain": "grain"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {name_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}


def imports_in(text: str) -> set[str]:
    """Return the modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in FILES else str(node.module))
    return found


IMPORTS = {name: imports_in(path.read_text()) for name, path in FILES.items()}


def room_of(name: str) -> str | None:
    """Return the folder of a module, or `None` for a file at the root."""
    _, *inner = name.split(".")
    return inner[0] if inner and inner[0] in BELOW else None


@functools.cache
def floor_of(name: str) -> int:
    """The longest chain of imports from a module; a circle of imports never ends."""
    below = IMPORTS[name] & FILES.keys() - {name}
    return 1 + max(map(floor_of, below), default=0)


def test_every_folder_is_a_room():
    folders = {path.parent.name for path in (ROOT / PACKAGE).rglob("*.py")}
    assert folders == {PACKAGE, *BELOW}


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down(name: str):
    room = room_of(name)
    ours = {x for x in IMPORTS[name] if x.split(".")[0] == PACKAGE} - {name}
    assert ours <= FILES.keys()
    if room is not None:
        allowed = {room, *BELOW[room]}
        assert {room_of(x) for x in ours} <= allowed
    assert floor_of(name) <= FLOORS


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_needs_an_extra_is_imported_by_nothing_else(extra: str):
    for name, modules in IMPORTS.items():
        part = (name.split(".") + [""])[1]
        if part.lstrip("_") != extra.lstrip("_"):
            assert not any(f"{x}.".startswith(f"{PACKAGE}.{extra}.") for x in modules)
        if EXTRAS[extra] in {module.split(".")[0] for module in modules}:
            assert EXTRAS.get(part) == EXTRAS[extra]


def test_the_core_knows_no_devices_and_compiles_nothing():
    for name, path in FILES.items():
        if room_of(name) == "_core":
            text = path.read_text()
            assert "jax.jit(" not in text and "shard_map(" not in text, name
            assert "Mesh" not in text, name
