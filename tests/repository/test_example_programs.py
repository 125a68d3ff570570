"""The programs of docs/examples, on small models and data."""

import importlib.util
import json

import captioned
import jax
import pytest
import runs

import infcl_jax
from infcl_jax.settings import make_config

pytestmark = pytest.mark.runs

EXAMPLES = runs.ROOT / "docs" / "examples"
SMALL = {"total_steps": 2, "epochs": None, "batch_size": 8, "num_workers": 0, "optimizer": {"warmup_steps": 0}}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        yield


def program(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_program_has_60_lines():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < 60


def test_fine_tune(tmp_path, monkeypatch):
    fine_tune, photos = program("fine_tune"), tmp_path / "photos"
    captioned.write_folder(photos, [(f"{i}", {"jpg": captioned.jpeg(i)}) for i in range(40)])
    captioned.write_csv(photos / "captions.csv", [(f"{i}.jpg", f"picture {i}") for i in range(40)], ("path", "caption"))
    settings = fine_tune.settings(str(photos))
    assert make_config(settings)
    small = {"model": "tiny", "init": {}, "optimizer": {"warmup_steps": 0}, "export": False}
    monkeypatch.setattr(fine_tune, "settings", lambda photos: settings | SMALL | small)
    nearest = fine_tune.main(str(photos), "picture 3", str(tmp_path / "run"))
    assert len(set(nearest)) == 10 and all(name.endswith(".jpg") for name in nearest)


def test_nnx_loop(capsys):
    program("nnx_loop").main(steps=20, batch_size=64)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0] / 1.5


def test_a_large_batch_fits_on_a_gpu_of_80_gb():
    config = make_config(program("large_batch").settings("digits") | {"epochs": None, "total_steps": 2000})
    assert "\nfits" in infcl_jax.plan(config, device="H100-80")


def test_dpr(tmp_path, monkeypatch):
    dpr = program("dpr")
    rows = [{"query": f"where is {i}?", "pos": [f"{i} is here."], "neg": [f"{i} is not there."]} for i in range(16)]
    corpus = [{"_id": str(i), "text": row["pos"][0]} for i, row in enumerate(rows)]
    for name, lines in (("train", rows), ("corpus", corpus)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = dpr.settings(str(tmp_path / "train.jsonl"))
    assert make_config(settings)
    small = {"model": "bert-tiny", "model_overrides": "text.context_length=32", "init": {}, "grad_cache": {}}
    monkeypatch.setattr(dpr, "settings", lambda pairs: settings | SMALL | small)
    best = dpr.main(
        *(str(tmp_path / f"{name}.jsonl") for name in ("train", "corpus")), "where is 3?", str(tmp_path / "run")
    )
    assert len(set(best)) == 5 and set(best) <= {line["text"] for line in corpus}
