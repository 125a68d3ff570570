"""Special files in place of the files of a dataset."""

import json
import os
import socket
from pathlib import Path

import numpy as np

from tests.faults import images, tars
from tests.faults.case import Case, choose

HUGE = 50 * 2**30  # bytes


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


SPECIAL = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "folder": os.mkdir,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/null": lambda path: path.symlink_to("/dev/null"),
    "link to nothing": lambda path: path.symlink_to("gone"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "huge": lambda path: (path.touch(), os.truncate(path, HUGE)),
}
# The dataset, the file that is replaced, and whether the dataset may be refused.
FILES = (
    ("a.csv", "a.csv", True),
    ("a.tsv", "a.tsv", True),
    ("a.jsonl", "a.jsonl", True),
    ("a.parquet", "a.parquet", True),
    ("photos", "photos/metadata.csv", True),
    ("photos", "photos/1.png", False),
    ("photos", "photos/1.txt", False),
    ("photos", "photos/classes.txt", False),
    ("photos", "photos/templates.txt", False),
    ("kinds", "kinds/classes.json", True),
    ("b.csv", "photos/1.png", False),
    ("*.tar", "a.tar", True),
    ("a.tar", "a.tar", True),
    ("a.tar", "index", False),
    ("a.tar", "classes.txt", True),
    ("a.tar", "templates.txt", True),
    ("m.json", "m.json", True),
    ("m.json", "a.tar", True),
)


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Write a dataset with a special file in place of one of its files."""
    (name, replaced, may_be_refused), kind = choose(FILES, rng), choose(tuple(SPECIAL), rng)
    pixels = [images.rgb(rng) for _ in range(2)]
    files = [images.encoded(images.Image.fromarray(p), "PNG") for p in pixels]
    expected = {f"caption {i}": p for i, p in enumerate(pixels)}
    (folder / "photos").mkdir()
    (folder / "kinds/cat").mkdir(parents=True)
    (folder / "m.json").write_text(json.dumps([{"path": "a.tar"}]))
    (folder / "b.csv").write_text("path,caption\nphotos/0.png,caption 0\nphotos/1.png,caption 1\n")
    for i, data in enumerate(files):
        (folder / f"photos/{i}.png").write_bytes(data)
        (folder / f"photos/{i}.txt").write_text(f"caption {i}")
        (folder / f"kinds/cat/{i}.png").write_bytes(data)
        with tars.tarfile.open(folder / f"{'ab'[i]}.tar", "w") as tar:
            for j, other in enumerate(files):
                tars.member(tar, f"{j}.png", other)
                tars.member(tar, f"{j}.txt", f"caption {j}".encode())
    if replaced == "index":
        tars.load_source(str(folder / "a.tar"), "train")
        (path,) = folder.glob(".tar_index_*")
    else:
        path = folder / replaced
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    if replaced == "photos/1.png" or replaced == "photos/1.txt":
        expected.pop("caption 1")
    if may_be_refused or name == "kinds":
        expected = {}
    return Case(f"{kind} for {replaced} of {name}", f"{folder}/{name}", expected, may_be_refused=may_be_refused)
