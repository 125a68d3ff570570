"""The README's commands for a user's own images.

A folder with a table and tar files of the same samples give the same losses. With 2,000 images, printing the losses:

    python -m pytest -q -s -m full tests/experiments/test_own_images.py
"""

import re
import shlex

import captioned
import numpy as np
import pytest
import runs
from PIL import Image

from infcl_jax.data.encode import encode_jpeg
from infcl_jax.training import METRICS_FILE, read_metrics

SMALL = {"model": "tiny", "model_overrides": runs.OVERRIDES, "log_every": 1, "eval_every": 0, "checkpoint_every": 0}
RUN = {**SMALL, "optimizer.warmup_steps": 0, "evaluation.retrieval_dataset": None}


def photos(count):
    """(key, {extension: contents}) of smooth images of several sizes, whose captions tell their color."""
    for number, color in enumerate(np.random.default_rng(0).integers(0, 256, (count, 2, 2, 3), dtype=np.uint8)):
        size = (64 + number % 40, 48 + number % 30)
        image = encode_jpeg(np.asarray(Image.fromarray(color).resize(size, Image.Resampling.BICUBIC)))
        caption = f"photo {number} in rgb {' '.join(map(str, color.mean(axis=(0, 1)).astype(int)))}"
        yield f"{number:06d}", {"jpg": image, "txt": caption.encode()}


def write(folder, count):
    """Write a folder with a table and the same samples as two tar files, three of them damaged."""
    samples = list(photos(count))
    for number in (0, count // 3, count // 2):
        samples[number][1]["jpg"] = samples[number][1]["jpg"][:500]
    captioned.write_folder(folder / "photos", [(key, {"jpg": contents["jpg"]}) for key, contents in samples])
    rows = [(f"{key}.jpg", contents["txt"].decode()) for key, contents in samples]
    captioned.write_csv(folder / "photos" / "captions.csv", rows, ("path", "caption"))
    for number, span in enumerate((samples[: count // 2], samples[count // 2 :])):
        captioned.write_tar(folder / f"photos-{number:05d}.tar", captioned.members(span))


def commands():
    """Flags of the README's commands."""
    lines = re.findall(r"^    python -m experiments\.train (.*photos.*)$", (runs.ROOT / "README.md").read_text(), re.M)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (64, {"batch_size": 16, "total_steps": 6}),
        pytest.param(2000, {"batch_size": 200, "total_steps": 30}, marks=pytest.mark.full),
    ],
)
def test_a_folder_and_tar_files_train_to_the_same_losses(tmp_path, count, changes):
    write(tmp_path, count)
    settings = [f"--config.{name}={value}" for name, value in (RUN | changes).items()]
    curves = []
    for flags in commands():
        moved = [re.sub(r"=(photos|runs)", rf"={tmp_path}/\1", flag) for flag in flags]
        (workdir,) = [flag.removeprefix("--workdir=") for flag in moved if flag.startswith("--workdir=")]
        (dataset,) = [flag.removeprefix("--config.dataset=") for flag in moved if flag.startswith("--config.dataset=")]
        status, output, errors = runs.command("experiments.train", *moved, *settings)
        assert status == 0, errors
        assert output.splitlines()[-1].endswith(f"  replaced bad records: 3 of {dataset}")
        assert len([line for line in errors.splitlines() if "replaced by the next record" in line]) == 3
        lines = read_metrics(f"{workdir}/{METRICS_FILE}")
        assert lines[-1][f"data/bad_records/{dataset}"] == 3
        curves.append([[line[name] for name in ("step", "loss", "logit_scale", "grad_norm")] for line in lines])
        print([line[1] for line in curves[-1]])
    assert len(curves) == 2 and len(curves[0]) == changes["total_steps"]
    assert curves[0] == curves[1]
    assert curves[0][-1][1] < curves[0][0][1]


@pytest.mark.slow
def test_two_processes_count_bad_records_together(tmp_path):
    """Each process reads half of every batch, and so some of the damaged images."""
    write(tmp_path, 64)
    dataset = f"{tmp_path}/photos"
    changes = RUN | {"dataset": dataset, "batch_size": 16, "total_steps": 4, "seed": 1}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    command = ("experiments.train", "--config=configs/base.py", f"--workdir={tmp_path}/run", *flags)
    finished = runs.finish(*runs.start_cluster(2, *command))
    warnings = [process.stderr.count("replaced by the next record") for process in finished]
    assert [process.returncode for process in finished] == [0, 0], finished
    assert sum(warnings) == 3 and min(warnings) > 0
    assert finished[0].stdout.splitlines()[-1].endswith(f"  replaced bad records: 3 of {dataset}")
    assert read_metrics(f"{tmp_path}/run/{METRICS_FILE}")[-1][f"data/bad_records/{dataset}"] == 3


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ("missing.tar", "1 of the 1 shards of .* do not exist, the first is .*missing.tar; check the path"),
        ("empty", "has 0 images and none with a caption; put KEY.txt beside KEY.jpg"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, dataset, match):
    (tmp_path / "empty").mkdir()
    flags = [f"--config.dataset={tmp_path}/{dataset}", "--config.split=train", "--config.model=tiny"]
    command = ("experiments.train", "--config=configs/base.py", f"--workdir={tmp_path}/run", *flags)
    status, _, errors = runs.command(*command)
    (line,) = errors.splitlines()
    assert status == 1 and re.match(f"error: .*{match}", line), line
