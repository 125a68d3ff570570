"""Names that the pages of docs/api document."""

import importlib
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
OBJECTS = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def resolve(name):
    """Import the object that an API page names by its path."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
