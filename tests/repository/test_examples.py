"""The examples in the docstrings of the API pages."""

import doctest
import importlib
import inspect
import json
import shutil

import captioned
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import retrieval_runs
import runs
from api_pages import OBJECTS, public_names, resolve

import infcl_jax
from infcl_jax.data import FeatureStore
from infcl_jax.inference.feature_files import write_features
from infcl_jax.models import l2_normalize
from infcl_jax.run import notebook
from infcl_jax.run.callbacks import Callbacks
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import make_config

pytestmark = pytest.mark.runs

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
    "infcl_jax.verification",
    "infcl_jax.runtime.distributed",
    "infcl_jax.runtime.mesh",
    "infcl_jax.runtime.processes",
    "infcl_jax.ops.pairwise.lse",
    "infcl_jax.ops.pairwise.sigmoid",
)
PUBLIC = [name for name in OBJECTS if callable(resolve(name))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the files that the examples read: images with captions, a run, features."""
    folder = tmp_path_factory.mktemp("examples")
    captioned.write_folder(folder / "photos", captioned.samples(8))
    for number, name in enumerate(("cat", "dog")):
        (folder / f"{name}.jpg").write_bytes(captioned.jpeg(number))
    (folder / "lost.csv").write_text("path,caption\ncat.jpg,a cat\nlost.jpg,a dog\n")
    (folder / "classnames.txt").write_text("robin\nwren\n")
    (folder / "templates.txt").write_text("a photo of a {c}.\n")
    runs.save(folder / "runs" / "digits", {1: 1.0})
    (folder / "runs" / "digits" / "metrics.jsonl").write_text('{"step": 1, "time": 1, "loss": 4.1}\n')
    write_retrieval(folder / "dpr")
    retrieval_runs.save(folder / "runs" / "dpr", retrieval_runs.settings(folder / "dpr"))
    store = FeatureStore(folder / "store", "key", 20)
    store.write(0, {"features": np.eye(20, 24, dtype=np.float32), "starts": np.arange(21)})
    write_features(folder / "photos.safetensors", store, "{}.jpg".format)
    return folder


def write_retrieval(folder):
    """Write questions with passages, a corpus, questions with answers, and judgments."""
    folder.mkdir()
    passages = [{"title": f"Book {i}", "text": f"by author {i}"} for i in range(8)]
    queries = [f"who wrote book {i}?" for i in range(8)]
    pairs = zip(queries, passages, strict=True)
    (folder / "train.json").write_text(json.dumps([{"question": q, "positive_ctxs": [p]} for q, p in pairs]))
    rows = [f"{i}\t{p['text']}\t{p['title']}" for i, p in enumerate(passages)]
    (folder / "corpus.tsv").write_text("\n".join(["id\ttext\ttitle", *rows]))
    (folder / "qa.csv").write_text("\n".join(f"{q}\t['author {i}']" for i, q in enumerate(queries)))
    (folder / "qrels.tsv").write_text("\n".join(f"{i} 0 {i} 1" for i in range(8)))


@pytest.fixture(scope="module")
def names():
    """Collect the names that docs/api/index.md promises to the examples."""
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "infcl_jax": infcl_jax}
    for package in map(importlib.import_module, PACKAGES):
        public = public_names(package) or [name for name in vars(package) if not name.startswith("_")]
        # `infcl_jax.data.convert` is another function than `infcl_jax.models.convert.convert`.
        names |= {name: getattr(package, name) for name in public if name not in names}
    image, noise = (jax.random.normal(jax.random.key(i), (8, 4)) for i in (0, 1))
    image, text = (l2_normalize(x, "float32") for x in (image, image + 0.5 * noise))
    model, batch = runs.model(), runs.batch(8)
    pixels, tokens = batch["image"], batch["text"]
    variables = jax.jit(model.init)(jax.random.key(0), pixels, tokens)
    arrays = {"image": image, "text": text, "pixels": pixels, "tokens": tokens}
    return names | arrays | {"mesh": data_mesh(), "model": model, "variables": variables}


def quick_train(settings, workdir, callbacks=()):
    """Check settings and callbacks of a training that `tests/run/test_train.py` does, and save a run."""
    assert make_config(settings) and Callbacks(callbacks)
    shutil.copytree("runs/digits", workdir, dirs_exist_ok=True)
    for callback in callbacks:
        callback.on_step(1, {"loss": 4.1})


def doctest_of(name):
    """Parse the examples of an object; a dataclass without docstring has none."""
    return doctest.DocTestParser().get_doctest(inspect.getdoc(resolve(name)) or "", {}, name, None, None)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name, names, folder, monkeypatch):
    test = doctest_of(name)
    assert test.examples, "expected an example in the docstring"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(infcl_jax, "train", quick_train, raising=False)
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    test.globs = dict(names)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    output = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as for a user
        doctest.DocTestRunner(optionflags=options, verbose=False).run(test, out=output.append)
    assert not output, "".join(output)
