"""The pages of the documentation site, `make docs`."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest
from api_pages import DOCS, OBJECTS, public_names, resolve

ROOT = DOCS.parent
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
ROOT_PAGES = {"contributing.md", "changelog.md"}  # which docs/site_hooks.py adds
PACKAGES = [
    "infcl_jax",
    *(
        f"infcl_jax.{name}"
        for name in (
            "data",
            "evaluation",
            "grad_cache",
            "losses",
            "models",
            "ops.pairwise.lse",
            "ops.pairwise.sigmoid",
            "planner",
            "report",
            "training",
            "verification",
        )
    ),
]


def test_every_page_is_in_the_navigation_once():
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "archive"]
    assert sorted(re.findall(r"[\w/]+\.md", NAV)) == sorted([*pages, *ROOT_PAGES])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_is_on_an_api_page(package):
    module = importlib.import_module(package)
    public = [getattr(module, name) for name in public_names(module)]
    documented = [resolve(name) for name in OBJECTS]
    assert [x for x in public if callable(x) and not any(x is other for other in documented)] == []
    modules = [value.__name__ for value in public if inspect.ismodule(value)]
    assert all(any(path.startswith(f"{name}.") for path in OBJECTS) for name in modules)


def test_importing_infcl_jax_provides_every_name():
    code = "import infcl_jax; print(*dir(infcl_jax)); infcl_jax.models.CLIP"
    names = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert {name.split(".")[1] for name in OBJECTS} - {*names} == set()


def test_no_object_is_on_two_api_pages():
    assert len({id(resolve(name)) for name in OBJECTS}) == len(OBJECTS)


def test_no_api_page_names_a_module_of_a_functions_name():
    """The site would show all of the module, because Griffe looks up modules first."""

    def is_module(name):
        path = ROOT / name.replace(".", "/")
        return path.with_suffix(".py").exists() or path.is_dir()

    assert [name for name in OBJECTS if is_module(name)] == []
    for package in PACKAGES:  # a function that a package imports from its module of that name has its full name
        for name in public_names(importlib.import_module(package)):
            if is_module(path := f"{package}.{name}") and callable(resolve(path)):
                assert f"{path}.{name}" in OBJECTS


def test_no_address_is_a_placeholder():
    files = [ROOT / name for name in ("README.md", "pyproject.toml", "mkdocs.yml", "CITATION.cff", "CONTRIBUTING.md")]
    files += [*DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert [
        path.name for path in files if re.search(r"ORGANIZATION|your-org|github\.com/OWNER", path.read_text())
    ] == []
