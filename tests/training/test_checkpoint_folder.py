"""Names of checkpoints, their listing and the best one."""

import math
import os

import pytest

from infcl_jax.training.checkpoint_folder import CheckpointFolder, Retention, split_checkpoint

FOREIGN = ("0007", "7abc", "٣", "²", "-1", "+4", " 5", "1_0", "1.0", "9" * 30, "notes")


@pytest.mark.parametrize("name", FOREIGN)
def test_only_a_number_in_its_usual_form_is_a_step(name, tmp_path):
    for folder in ("3", "12", name):
        (tmp_path / folder).mkdir()
    (tmp_path / "5").write_text("a file")
    checkpoints = CheckpointFolder(tmp_path, print)
    assert checkpoints.steps() == [3, 12]
    checkpoints.delete_old(Retention(latest=1))
    assert checkpoints.steps() == [12] and (tmp_path / name).is_dir()
    assert split_checkpoint(tmp_path / name)[1] is None


def test_what_blocks_a_save_is_removed_and_no_link_is_followed(tmp_path):
    folder, outside = tmp_path / "checkpoints", tmp_path / "outside"
    for path in (folder, outside / "state"):
        path.mkdir(parents=True)
    (folder / "5").write_text("a file")
    (folder / "6").symlink_to(tmp_path / "missing")
    (folder / "8.orbax-checkpoint-tmp").write_text("a file")
    for name in ("7", "9", "9.orbax-checkpoint-tmp"):
        (folder / name).symlink_to(outside)
    checkpoints = CheckpointFolder(folder, print)
    checkpoints.prepare(None)
    assert sorted(os.listdir(folder)) == ["5.foreign", "6.foreign", "7", "9"]
    checkpoints.delete_old(Retention(latest=1))
    assert checkpoints.steps() == [9] and os.listdir(outside) == ["state"]


@pytest.mark.parametrize(("metric", "best"), [("top1", 3), ("validation/loss", 2)])
@pytest.mark.parametrize("missing", [{}, {"top1": math.nan, "validation/loss": math.nan}])
def test_no_number_is_worse_than_nan_or_a_missing_result(metric, best, missing):
    numbers = {2: {"top1": 0.1, "validation/loss": -1.0}, 3: {"top1": 0.5, "validation/loss": 1.0}}
    assert Retention(1, best=metric).kept({1: missing} | numbers | {4: missing, 5: missing}) == {best, 5}
    assert Retention(1, best=metric).kept({1: missing, 2: missing}) == {2}
