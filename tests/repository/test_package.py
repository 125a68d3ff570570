"""Contents of the wheel and the sdist, as pyproject.toml and MANIFEST.in select them; version and imports."""

import fnmatch
import pathlib
import subprocess
import sys
import tomllib

import infcl_jax

_ROOT = pathlib.Path(__file__).parents[2]
_LIBRARY = pathlib.PurePath("infcl_jax")
_PYPROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())
_SETUPTOOLS = _PYPROJECT["tool"]["setuptools"]
# Packages that take long to import, or that only training, data and evaluation need.
_LATE = "flax optax orbax grain tensorflow tensorflow_datasets ml_collections absl scipy matplotlib PIL pyarrow IPython"


def _folders(library):
    """Relative paths of folders with Python files, and of their parents."""
    with_code = {path.parent.relative_to(_ROOT) for path in (_ROOT / library).rglob("*.py")}
    return {folder for inner in with_code for folder in (inner, *inner.parents) if folder.parts}


def _is_package(folder):
    return all((_ROOT / path / "__init__.py").is_file() for path in (folder, *folder.parents) if path.parts)


def _found_packages():
    """Packages of `setuptools.find_packages`, written out because the tests do not depend on setuptools."""
    find = _SETUPTOOLS["packages"]["find"]
    assert find.keys() == {"include", "namespaces"} and not find["namespaces"]
    top_level = [path.name for path in _ROOT.iterdir() if (path / "__init__.py").is_file()]
    packages = {".".join(folder.parts) for name in top_level for folder in _folders(name) if _is_package(folder)}
    return {name for name in packages if any(fnmatch.fnmatchcase(name, pattern) for pattern in find["include"])}


def test_wheel_holds_the_library_alone():
    assert _found_packages() == {".".join(folder.parts) for folder in _folders(_LIBRARY)}


def test_sdist_holds_no_tests():
    # By default setuptools adds tests/test_*.py, without the helpers that they import.
    assert "prune tests" in (_ROOT / "MANIFEST.in").read_text().splitlines()


def test_every_folder_has_an_init_file():
    missing = [folder for folder in _folders(_LIBRARY) if not (_ROOT / folder / "__init__.py").is_file()]
    assert missing == []


def test_types_are_published():
    patterns = _SETUPTOOLS["package-data"]["infcl_jax"]
    assert [path.name for pattern in patterns for path in (_ROOT / _LIBRARY).glob(pattern)] == [
        "py.typed",
        "__init__.pyi",
    ]


def test_the_import_is_light_and_knows_its_version():
    """JAX takes most of the time. All names are imported on first use."""
    code = "import sys, infcl_jax; print(infcl_jax.__version__, *sys.modules)"
    code += "; infcl_jax.clip_loss is infcl_jax.losses.clip_loss, infcl_jax.ops, infcl_jax.grad_cache.Replay"
    version, *modules = subprocess.check_output([sys.executable, "-c", code], cwd=_ROOT, text=True).split()
    assert version == _PYPROJECT["project"]["version"]
    assert not {*_LATE.split(), "jax", "numpy", "infcl_jax.run", "infcl_jax.models", "infcl_jax.data"} & {*modules}
    assert all(hasattr(infcl_jax, name) for name in infcl_jax.__all__)
