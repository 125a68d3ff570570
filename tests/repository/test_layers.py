"""Imports between the packages of the library go down the layers, and never in a circle."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "infcl_jax"
LAYERS = (  # from the bottom to the top; packages of one layer may import each other
    {"runtime", "schema", "ops"},
    {"models", "data", "losses", "grad_cache"},
    {"training"},
    {"evaluation", "planner", "verification", "inference"},
    {"settings"},
    {"run", "report"},
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def imported(path):
    """Dotted names of the library that a file imports, also inside of functions."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) + 1 - node.level] if node.level else ()
            names = [".".join((*outer, *filter(None, [node.module]), name.name)) for name in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("infcl_jax."))


@functools.cache
def imports():
    """Pairs (package, other package that it imports)."""
    paths = {path: path.relative_to(LIBRARY).parts[0] for path in LIBRARY.rglob("*.py")}
    pairs = {
        (package, name.split(".")[1]) for path, package in paths.items() if package in LEVEL for name in imported(path)
    }
    return {(package, other) for package, other in pairs if package != other}


def test_imports_go_down_the_layers():
    up = {(package, other) for package, other in imports() if LEVEL.get(other, len(LAYERS)) > LEVEL[package]}
    assert up == set()
    assert {other for package, other in imports() if package == "ops"} == set()


def test_no_circle():
    below = {package: set() for package in LEVEL}
    for package, other in imports():
        below[package].add(other)
    TopologicalSorter(below).prepare()  # raises CycleError


def test_every_folder_is_in_a_layer():
    assert {path.parent.name for path in LIBRARY.glob("*/__init__.py")} - {"distributed"} <= LEVEL.keys()
    assert [path.name for path in LIBRARY.glob("*.py")] == ["__init__.py"]


def test_training_leaves_the_data_pipeline_alone():
    code = "import sys, infcl_jax.training; assert 'grain' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
