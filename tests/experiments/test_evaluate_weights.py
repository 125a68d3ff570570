"""Evaluation of OpenCLIP weights by the whole command (tests/golden/make_open_clip_evaluation.py)."""

import csv
import json
import re
import shutil
from pathlib import Path

import benchmark_layout as layout
import numpy as np
import pytest
import runs

import infcl_jax
from infcl_jax.models.convert.tensor_files import write_tensors
from infcl_jax.training import save_config

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "open_clip_evaluation.npz")
TEXTS = json.loads(str(GOLDEN["texts"]))
FILES = [GOLDEN[name].tobytes() for name in sorted(GOLDEN) if name.startswith("jpeg/")]
NAMES = {"acc1": "top1", "acc5": "top5", "mean_per_class_recall": "mean_per_class_recall"}
NAMES |= {f"image_retrieval_recall@{k}": f"text_to_image_r{k}" for k in (1, 5, 10)}
NAMES |= {f"text_retrieval_recall@{k}": f"image_to_text_r{k}" for k in (1, 5, 10)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TEXTS["config"]}))
    tensors = {name.removeprefix("weights/"): GOLDEN[name] for name in GOLDEN if name.startswith("weights/")}
    write_tensors(folder / "open_clip_model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    labeled = [{"jpg": data, "cls": str(label).encode()} for data, label in zip(FILES, TEXTS["labels"], strict=True)]
    layout.write_benchmark(folder / "wds_imagenetv2", labeled)
    (folder / "wds_imagenetv2" / "classnames.txt").write_text("\n".join(TEXTS["names"]))
    templates = folder / "wds_imagenetv2" / "zeroshot_classification_templates.txt"
    templates.write_text("\n".join(TEXTS["templates"]))
    pairs = [
        {"jpg": data, "txt": "\n".join(texts).encode()} for data, texts in zip(FILES, TEXTS["captions"], strict=True)
    ]
    layout.write_benchmark(folder / "wds_flickr30k", pairs, kind="retrieval")
    return folder


def test_features_are_those_of_open_clip(weights):
    found = infcl_jax.load(weights, batch_size=8).encode_images(FILES)
    np.testing.assert_allclose(found, GOLDEN["image_features"], atol=2e-6)


def test_a_file_of_weights_needs_the_name_of_its_model(weights, tmp_path):
    file = shutil.copy(weights / "open_clip_model.safetensors", tmp_path)
    found = infcl_jax.load(file, model=str(weights / "open_clip_config.json"), batch_size=8)
    np.testing.assert_array_equal(found.encode_images(FILES[:2]), infcl_jax.load(weights).encode_images(FILES[:2]))
    with pytest.raises(ValueError, match=r"expected open_clip_config.json or config.json beside .* name its model"):
        infcl_jax.load(file)
    with pytest.raises(ValueError, match=r"expected model=None for .*, which has a configuration, got 'ViT-B-32'"):
        infcl_jax.load(weights, model="ViT-B-32")


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 4])
def test_the_command_gives_open_clips_numbers(weights, benchmarks, tmp_path, devices):
    arguments = ("--suite=imagenet_variants", "--evaluations=flickr30k", "--batch_size=8")
    paths = (f"--weights={weights}", f"--data_dir={benchmarks}", f"--output={tmp_path}/out")
    status, stdout, stderr = runs.command("experiments.evaluate", *arguments, *paths, cpu_devices=devices)
    assert status == 0, stderr
    assert stderr.count("\n") == 1 and "imagenet_variants: 5 of 6 without data: imagenet_sketch, " in stderr
    results = {row["name"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["results"]}
    assert [*results] == ["imagenetv2", "flickr30k", "suite/imagenet_variants"]
    found = results["imagenetv2"]["metrics"] | results["flickr30k"]["metrics"]
    for theirs, value in TEXTS["metrics"].items():
        assert found[NAMES[theirs]] == pytest.approx(value, abs=1e-6), theirs
    top1 = TEXTS["metrics"]["acc1"]
    assert results["suite/imagenet_variants"]["metrics"] == {"average_of_1_of_6": pytest.approx(top1)}
    assert re.search(rf"^imagenetv2 \(top-k accuracy\) +{100 * top1:.1f} % ", stdout, re.MULTILINE)
    with open(tmp_path / "out" / "results.csv") as file:
        (row,) = csv.DictReader(file)
    assert float(row["imagenetv2/top1"]) == pytest.approx(top1)
    page = (tmp_path / "out" / "results.html").read_text()
    assert page.count("<img") == 24 and "great white shark" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights=nowhere",), "expected --suite or --evaluations with --weights, got none"),
        (("--weights=nowhere", "--evaluations=cifar10"), "got nowhere"),
        (("--output=a",), "expected --output with --weights only"),
        ((), "expected --workdir"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    status, _, stderr = runs.command("experiments.evaluate", *arguments)
    assert status == 1 and stderr.count("\n") == 1
    assert message in stderr


def test_weights_and_a_run_are_too_much(weights, tmp_path):
    save_config(tmp_path, runs.config().to_dict())
    status, _, stderr = runs.command("experiments.evaluate", f"--weights={weights}", f"--workdir={tmp_path}")
    assert (status, stderr.count("\n")) == (1, 1) and "expected --weights or --workdir, got both" in stderr
