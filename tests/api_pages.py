"""Names that the pages of docs/api document."""

import ast
import importlib
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
OBJECTS = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def resolve(name):
    """Import the object that an API page names by its path."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def public_names(package):
    """Return the names that a package re-exports: those of `from module import name as name`."""
    source = Path(package.__file__)
    source = source.with_suffix(".pyi") if source.with_suffix(".pyi").exists() else source
    imports = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
