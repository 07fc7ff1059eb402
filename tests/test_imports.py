"""What the files of the package may know: imports go down, and extras stay apart."""

import ast
import functools
import re
from pathlib import Path

from jax.extend.core import Primitive, primitives

from optax_tokenaccum._core import jaxprs

ROOT = Path(__file__).parents[1]
PACKAGE = "optax_tokenaccum"
# What the files of a folder may import, by the first part of their names.
BELOW = {"_core": {"_core"}, "_devices": {"_core", "_devices"}}
BELOW["_steps"] = BELOW["_devices"] | {"_steps"}
# Of these, nothing else knows. What needs an extra is also among them.
ABOVE, FLAX = {"debug", "linen", "nnx", "ragged"}, {"linen", "nnx"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts[1:] if part != "__init__")


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
                is_file = module.removeprefix(f"{PACKAGE}.") in FILES
                found.add(module if is_file else str(node.module))
    return {module.removeprefix(f"{PACKAGE}.") for module in found}


IMPORTS = {name: imports_in(path.read_text()) for name, path in FILES.items()}


def folder_of(name: str) -> str:
    return name.split(".")[0]


def test_imports_go_down_and_never_in_circles():
    for name in FILES.keys() - {""}:
        below = {*map(folder_of, IMPORTS[name] & FILES.keys() - {""})}
        folder = folder_of(name)
        assert below <= BELOW.get(folder, below), name
        assert not below & ABOVE - {folder}, name
        assert folder in FLAX or "flax" not in map(folder_of, IMPORTS[name]), name
        floor_of(name)


@functools.cache
def floor_of(name: str) -> int:
    """The longest chain of imports from a file; a circle of imports never ends."""
    below = IMPORTS[name] & FILES.keys() - {name}
    return 1 + max(map(floor_of, below), default=0)


def test_what_contributing_names_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = [path for path in ROOT.rglob("*.py") if ".git" not in path.parts]
    names = {x for path in files for x in re.findall(r"\w+", path.read_text())}
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        if re.fullmatch(r"[\w./]+", quoted) and not quoted.islower():
            assert {*re.findall(r"\w+", quoted)} <= names, quoted
        if quoted.endswith(".py"):
            assert any(path.as_posix().endswith(quoted) for path in files), quoted


def test_the_tree_in_contributing_has_every_file():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = page.split("```text\n")[1].split("```")[0]
    names = re.findall(r"^ *(\w+(?:\.py|/))", tree, re.MULTILINE)
    found = [*(x.name for x in FILES.values() if x.name != "__init__.py")]
    folders = {x.parent.name + "/" for x in FILES.values()}
    assert sorted(names) == sorted([*found, *folders])


def test_a_window_of_gradients_knows_no_devices_and_compiles_no_program():
    for name in ("accumulation", "backward", "jaxprs", "perturbations"):
        text = FILES[f"_core.{name}"].read_text()
        for word in ("Mesh", "donate", "shard_map(", "jax.jit("):
            assert word not in text, (name, word)


def test_no_platform_is_named_and_nothing_private_is_used():
    platforms = "lowering_platforms", "platform_dependent", "default_backend"
    for name, path in FILES.items():
        text = path.read_text()
        assert "jax._src" not in text, name
        assert not any(word in text for word in platforms), name


def test_one_file_names_operations_of_jaxprs_and_their_parameters():
    listed = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
    names = {*jaxprs._CLASSES, *jaxprs._UNLISTED, *jaxprs._CALLS, *listed}
    names -= {"name", "pcast", "pvary"}  # also a keyword, and functions of jax.lax
    for file in FILES.keys() - {"_core.jaxprs"}:
        for node in ast.walk(ast.parse(FILES[file].read_text())):
            match node:
                case ast.Attribute(attr="primitive"):
                    raise AssertionError((file, node.lineno))
                case ast.Attribute(ast.Name("eqn"), "params"):
                    raise AssertionError((file, node.lineno))
                case ast.Attribute(attr="eqns"):  # it evaluates them, in order
                    assert file == "_core.perturbations", (file, node.lineno)
                case ast.Constant(str(text)):
                    assert text not in names, (file, text)
