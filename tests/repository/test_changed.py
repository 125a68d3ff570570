"""Choice of the tests that `make check` runs."""

import subprocess

import pytest
from changed import changed_files, matching_tests


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("infcl_jax/losses/clip.py", ["tests/losses/test_clip.py"]),
        ("infcl_jax/models/__init__.py", None),
        (
            "infcl_jax/planner/state.py",
            [f"tests/planner/test_planner{suffix}.py" for suffix in ("", "_accuracy", "_search", "_times")],
        ),
        ("infcl_jax/runtime/distributed.py", ["tests/runtime/test_distributed.py"]),
        ("infcl_jax/run/train.py", ["tests/run/test_train.py"]),
        ("experiments/plan.py", ["tests/experiments/test_plan.py"]),
        ("experiments/benchmarks/loss.py", ["tests/experiments/benchmarks/test_loss.py"]),
        ("tests/ops/test_embedding.py", ["tests/ops/test_embedding.py"]),
        ("tests/oracle.py", []),
        ("README.md", []),
    ],
)
def test_a_module_has_the_matching_tests_its_name_or_folder(name, expected):
    if expected is None:
        assert {"tests/models/test_clip.py", "tests/models/test_vit.py"} < set(matching_tests(name))
    else:
        assert matching_tests(name) == expected


def test_committed_changed_and_untracked_files_differ_from_main(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(*names):
        for name in names:
            (tmp_path / name).write_text("committed")
        git("add", ".")
        git("commit", "--message=change")

    git("init", "--initial-branch=main")
    commit("same", "edited", "deleted")
    git("checkout", "-b", "branch")
    commit("committed")
    (tmp_path / "edited").write_text("edited")
    (tmp_path / "deleted").unlink()
    (tmp_path / "untracked").touch()
    assert changed_files(tmp_path) == ["committed", "edited", "untracked"]
