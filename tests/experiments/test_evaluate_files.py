"""Evaluation of a run on files of the user's own: folders, tables and tar files, on any number of processes."""

import json
import re

import captioned
import jax
import numpy as np
import pytest
import runs

from infcl_jax import run, train
from infcl_jax.data import ByteTokenizer
from infcl_jax.data.decode import decode
from infcl_jax.data.transforms import resize_center_crop
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import Checkpointer

IMAGES = 22
NAMES = ("cat", "dog", "sea lion")
CAPTIONS = [(f"image {i % 15}", f"another {i}") for i in range(IMAGES)]  # 14 of them are captions of two images
LABELS = [i % 5 % 3 for i in range(IMAGES)]
TEMPLATES = ("a {}", "one {} here")
NOTHING = dict.fromkeys(("evaluation.retrieval_dataset", "evaluation.zero_shot_dataset", "evaluation.gallery"))
SETTINGS = NOTHING | {"total_steps": 2}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two steps, with nothing to evaluate on."""
    workdir = tmp_path_factory.mktemp("run")
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        train(runs.config(**SETTINGS), workdir)
    return workdir


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same images in a folder with captions, and with labels in a table, subfolders and tar files."""
    data = tmp_path_factory.mktemp("data")
    images = [(f"{i:06d}", captioned.jpeg(i)) for i in range(IMAGES)]
    folder = captioned.write_folder(data / "folder", [(key, {"jpg": image}) for key, image in images])
    rows = [{"file_name": f"{i:06d}.jpg", "text": texts} for i, texts in enumerate(CAPTIONS)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = [(f"folder/{key}.jpg", NAMES[label]) for (key, _), label in zip(images, LABELS, strict=True)]
    captioned.write_csv(data / "labels.csv", table, ("path", "label"))
    classes = [
        (f"{NAMES[label].replace(' ', '_')}/{key}", {"jpg": image})
        for (key, image), label in zip(images, LABELS, strict=True)
    ]
    captioned.write_folder(data / "classes", classes)
    members = [
        (f"{key}.{extension}", content)
        for (key, image), label in zip(images, LABELS, strict=True)
        for extension, content in (("cls", str(label).encode()), ("jpg", image))
    ]
    (data / "tars").mkdir()
    captioned.write_tar(data / "tars" / "0.tar", members[:10])
    captioned.write_tar(data / "tars" / "1.tar", members[10:])
    (data / "tars" / "classes.txt").write_text("\n".join(NAMES))
    for path in (data, data / "classes", data / "tars"):
        (path / "templates.txt").write_text("\n".join(TEMPLATES))
    return data


def arguments(data, zero_shot, devices):
    settings = {"retrieval_dataset": data / "folder", "retrieval_split": "train", "batch_size": 8}
    settings |= {"zero_shot_dataset": f"{data}/{zero_shot}", "zero_shot_split": "train"}
    flags = [f"--config.evaluation.{name}={value}" for name, value in settings.items()]
    return [*flags, f"--config.cpu_devices={devices}"]


def results(workdir):
    return json.loads((workdir / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def expected(workdir):
    """The results by NumPy, with ties as misses."""
    config = runs.config(**SETTINGS)
    with jax.numpy_dtype_promotion("standard"), Checkpointer(workdir) as checkpoints:
        state = checkpoints.restore_latest(run.initial_state(config, data_mesh()))
    model, variables = runs.model(), jax.device_get(state.variables)
    tokenizer = ByteTokenizer(runs.CONTEXT)

    def encode(name, inputs):
        features = jax.jit(lambda variables: model.apply(variables, inputs, method=f"encode_{name}"))(variables)
        return np.asarray(features, np.float64)

    pixels = [resize_center_crop(decode(captioned.jpeg(i)), runs.SIDE) for i in range(IMAGES)]
    image, text = encode("image", np.stack(pixels)), encode("text", tokenizer([t for texts in CAPTIONS for t in texts]))
    prompts = encode("text", tokenizer([t.replace("{}", name) for name in NAMES for t in TEMPLATES]))
    classes = prompts.reshape(len(NAMES), len(TEMPLATES), -1).mean(axis=1)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    owner, rows = np.repeat(np.arange(IMAGES), 2), np.arange(IMAGES)
    similarity, own = image @ text.T, owner == rows[:, None]
    best = np.where(own, similarity, -np.inf).max(axis=1, keepdims=True)
    rivals = {
        "retrieval/image_to_text_r": (~own & (similarity >= best - 1e-6)).sum(axis=1),
        "retrieval/text_to_image_r": (~own & (similarity >= similarity[owner, np.arange(len(owner))] - 1e-6)).sum(
            axis=0
        ),
        "zero_shot/top": (image @ classes.T > (image @ classes.T)[rows, LABELS][:, None] - 1e-6).sum(axis=1) - 1,
    }
    return {f"{name}{k}": (rank < k).mean() for name, rank in rivals.items() for k in (1, 5, 10)}


def assert_equal(found, expected):
    for name, value in expected.items():
        if name not in ("zero_shot/top5", "zero_shot/top10"):  # of fewer than six classes
            assert found[name] == pytest.approx(value, abs=1e-9), name
    assert 0 < found["retrieval/text_to_image_r5"] < 1 and 0 < found["zero_shot/top1"] < 1


@pytest.mark.parametrize(("zero_shot", "devices"), [("labels.csv", 8), ("tars/*.tar", 1)])
def test_folders_tables_and_tars_equal_numpy(workdir, data, expected, zero_shot, devices):
    status, stdout, stderr = runs.command(
        "experiments.evaluate", f"--workdir={workdir}", *arguments(data, zero_shot, devices)
    )
    assert status == 0 and re.fullmatch(
        r"[^\n]* 14 of 44 captions have the features of another image's[^\n]*\n", stderr
    )
    assert_equal(results(workdir), expected)
    assert "retrieval image to text (R@k)" in stdout


def test_subfolders_on_two_processes_equal_numpy(workdir, data, expected):
    command = ("experiments.evaluate", f"--workdir={workdir}", *arguments(data, "classes", 4))
    finished = runs.finish(*runs.start_cluster(2, *command))
    assert [process.returncode for process in finished] == [0, 0], finished
    assert_equal(results(workdir), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"retrieval_dataset": "{}/classes"}, "expected a retrieval_dataset with captions, got .*/classes"),
        ({"zero_shot_dataset": "{}/folder"}, "metadata.jsonl has no label column; its columns are file_name, text"),
        ({"zero_shot_dataset": "{}/tars"}, "tars is one split, train, got split 'zero_shot'; use train"),
    ],
)
def test_mistakes_are_one_line(workdir, data, change, message):
    flags = [f"--config.evaluation.{name}={value.format(data)}" for name, value in change.items()]
    if "tars" not in str(change):
        flags += ["--config.evaluation.zero_shot_split=train", "--config.evaluation.retrieval_split=train"]
    status, _, stderr = runs.command("experiments.evaluate", f"--workdir={workdir}", *flags)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr
