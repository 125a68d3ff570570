"""Private names of JAX and other packages, compared with the table in CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

import pytest

SELF = Path(__file__)
ROOT = SELF.parents[2]
FOLDERS = ("infcl_jax", "experiments", "configs", "docs", "notebooks", "tests")
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}  # of named tuples and of `os`
ACCESS = ("getattr", "hasattr", "setattr", "delattr")


def is_foreign(name, own):
    """Return whether a dotted name has a private component that is not our own."""
    private = (n for n in name.split(".") if n.startswith("_") and not n.endswith("__"))
    return name.startswith("jaxlib.") or not own.issuperset(private)


def own_names(nodes):
    """Names that a module binds: functions, classes, variables and attributes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def foreign_names(nodes, own):
    """Private modules and attributes of other packages, also in strings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        names = []
        match node:
            case ast.Import(names=imported):
                names = [n.name for n in imported]
            case ast.ImportFrom(module=str(module), names=imported, level=0):
                names = [f"{module}.{n.name}" for n in imported]
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Call(
                func=ast.Attribute(attr=function) | ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]
            ):
                names = [name] if function in ACCESS else []
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names = re.findall(r"\b\w+\._src\b[\w.]*", text)
        yield from (name for name in names if is_foreign(name, own))


def used(sources):
    """Pairs (file, name) of the files with these contents."""
    nodes = {path: list(ast.walk(ast.parse(text))) for path, text in sources.items()}
    own = PUBLIC.union(*map(own_names, nodes.values()))
    return {(path, name) for path, of_file in nodes.items() for name in foreign_names(of_file, own)}


def test_the_list_of_private_names_is_complete():
    rows = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = {(path, name) for path, names in rows for name in re.findall(r"`([^`]+)`", names)}
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != SELF]
    assert used({str(path.relative_to(ROOT)): path.read_text() for path in paths}) == listed


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from jax._src import core", "jax._src.core"),
        ("import orbax.checkpoint._src.path", "orbax.checkpoint._src.path"),
        ("from grain import _core", "grain._core"),
        ("from jaxlib import xla_client", "jaxlib.xla_client"),
        ("import jaxlib.mlir.ir", "jaxlib.mlir.ir"),
        ("run('from jax._src import core')", "jax._src"),
        ("monkeypatch.setattr('jax._src.core.x', 1)", "jax._src.core.x"),
        ("jax.core._trace()", "_trace"),
        ("getattr(mesh, '_devices')", "_devices"),
    ],
)
def test_private_names_are_found(code, name):
    assert used({"a.py": code}) == {("a.py", name)}


def test_public_and_own_names_are_not_listed():
    code = '''"""About jax._src."""
from __future__ import annotations
import jaxlib
def _own(): return jaxlib.__version__
module._own(pair._replace(x=1))
'''
    assert used({"a.py": code}) == set()
