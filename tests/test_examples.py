"""The examples in the docstrings of the API pages."""

import doctest
import importlib
import inspect

import captioned
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from test_site import OBJECTS, resolve

import infcl_jax
from infcl_jax.distributed import data_mesh

# The page docs/api/index.md says that the examples import these.
PACKAGES = (
    "infcl_jax",
    "infcl_jax.losses",
    "infcl_jax.training",
    "infcl_jax.models",
    "infcl_jax.models.convert",
    "infcl_jax.data",
    "infcl_jax.evaluation",
    "infcl_jax.planner",
    "infcl_jax.settings",
    "infcl_jax.report",
    "infcl_jax.distributed",
    "infcl_jax.ops.pairwise_lse",
)
PUBLIC = [name for name in OBJECTS if callable(resolve(name))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the files that the examples read: a run, a folder of images with captions, features."""
    folder = tmp_path_factory.mktemp("examples")
    runs.save(folder / "runs" / "digits", {1: 1.0})
    for number, name in enumerate(("cat", "dog")):
        (folder / f"{name}.jpg").write_bytes(captioned.jpeg(number))
    return folder


@pytest.fixture(scope="module")
def names():
    """Import what the examples use: packages, features of 8 pairs, a small model."""
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax}
    for package in map(importlib.import_module, PACKAGES):
        public = getattr(package, "__all__", [name for name in vars(package) if not name.startswith("_")])
        # `infcl_jax.data.convert` is another function than `infcl_jax.models.convert.convert`.
        names |= {name: getattr(package, name) for name in public if name not in names}
    features = (jax.random.normal(jax.random.key(i), (8, 4)) for i in (0, 1))
    image, text = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in features)
    return names | {"infcl_jax": infcl_jax, "mesh": data_mesh(), "image": image, "text": text}


def doctest_of(name):
    target = resolve(name)
    text = inspect.getdoc(target) if "__doc__" in vars(target) or not isinstance(target, type) else ""
    return doctest.DocTestParser().get_doctest(text or "", {}, name, None, None)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    test = doctest_of(name)
    assert test.examples, "expected an example in the docstring"
    test.globs = dict(names)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    output = []
    runner = doctest.DocTestRunner(optionflags=options, verbose=False)
    runner.run(test, out=output.append, clear_globs=False)
    assert not runner.failures, "".join(output)
