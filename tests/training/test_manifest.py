"""Manifests of checkpoints: damage of any file is named, and nothing damaged is restored."""

import json
import runpy
from pathlib import Path

import pytest
from etils import epath

from infcl_jax.training.checkpoint_folder import MANIFEST, _replace, read_results, verify, write_manifest

FAULTS = Path(__file__).parents[1] / "faults"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "state" / "d" / "array").write_bytes(bytes(range(100)))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {"manifest": MANIFEST}}))
    write_manifest(epath.Path(tmp_path), {"zero_shot/top1": 0.5})
    return tmp_path


def test_an_intact_checkpoint_has_its_results(folder):
    assert verify(epath.Path(folder)) == (None, True, True)
    assert read_results(epath.Path(folder)) == {"zero_shot/top1": 0.5}


@pytest.mark.parametrize(
    ("file", "content", "damage"),
    [
        ("state/d/array", bytes(99), "state/d/array has 99 instead of 100 bytes"),
        ("state/d/array", bytes(100), "state/d/array has another checksum"),
        ("empty", b"x", "empty has 1 instead of 0 bytes"),
        ("empty", None, "empty is missing"),
        (MANIFEST, b"", f"{MANIFEST} is missing or damaged"),
        (MANIFEST, b"[]", f"{MANIFEST} is missing or damaged"),
        (MANIFEST, b"\xff", f"{MANIFEST} is missing or damaged"),
    ],
)
def test_damage_is_named(folder, file, content, damage):
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    assert verify(epath.Path(folder)) == (damage, True, True)


@pytest.mark.parametrize(
    ("file", "value"),
    [("../outside", 0.5), ("/outside", 0.5), ("state/../../outside", 0.5), ("a\0b", 0.5), (None, 10**400)],
)
def test_a_manifest_names_no_file_outside_and_no_huge_result(folder, file, value):
    files = json.loads((folder / MANIFEST).read_text())["files"]
    _replace(epath.Path(folder), files | ({file: files["empty"]} if file else {}), {"zero_shot/top1": value})
    assert verify(epath.Path(folder)).damage == f"{MANIFEST} is missing or damaged"
    assert read_results(epath.Path(folder)) == {}


def test_a_save_without_its_manifest_is_incomplete(folder):
    (folder / MANIFEST).unlink()
    assert verify(epath.Path(folder)) == (f"its save did not end, {MANIFEST} is missing", True, False)


def test_every_bit_of_the_manifest_counts(folder):
    content = (folder / MANIFEST).read_bytes()
    for number in range(0, 8 * len(content), 29):  # coprime to 8
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        (folder / MANIFEST).write_bytes(changed)
        assert verify(epath.Path(folder)).damage


def test_a_checkpoint_of_an_earlier_version_is_unchecked(folder):
    (folder / MANIFEST).unlink()
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    assert verify(epath.Path(folder)) == (None, False, True)


def test_damaged_files_are_noticed_and_the_previous_checkpoint_is_restored():
    outcomes = runpy.run_path(str(FAULTS / "bit_flips.py"))["count_outcomes"](count=5)
    assert {fault: dict(counts) for fault, counts in outcomes.items()} == {
        "flipped bit": {"noticed": 5},
        "truncated": {"noticed": 1},
        "removed": {"noticed": 1},
    }
