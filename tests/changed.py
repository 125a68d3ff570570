"""Run the tests of the files that differ from the main branch.

    python tests/changed.py

Files count whether committed or not. A module's test file is the one of its name. Without one, all tests of the
module's folder run. Changed test files run themselves. A changed helper such as `tests/oracle.py` selects nothing;
`make test-all` runs everything.
"""

import subprocess
import sys
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parents[1]


def changed_files(root: Path = ROOT) -> list[str]:
    """Files that differ from the merge base with the main branch, and untracked files."""

    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.splitlines()

    (base,) = lines("merge-base", "HEAD", "origin/main") or lines("merge-base", "HEAD", "main") or ["HEAD"]
    untracked = lines("ls-files", "--others", "--exclude-standard")
    return [*lines("diff", "--name-only", "--diff-filter=d", base), *untracked]


def matching_tests(name: str, root: Path = ROOT) -> list[str]:
    """Test files of one file of the repository."""
    package, *inner = (path := PurePath(name)).parts
    if package == "tests":
        return [name] if path.match("test_*.py") else []
    if package not in ("infcl_jax", "experiments") or path.suffix != ".py":
        return []
    module = root / "tests" / (name if package == "experiments" else PurePath(*inner))
    folder, own = module.parent, module.with_name(f"test_{module.name}")
    if own.exists():
        paths = [own]
    elif folder.is_dir():
        paths = [] if folder == root / "tests" else folder.glob("test_*.py")
    else:  # such as tests/planner/test_planner.py of infcl_jax/planner
        paths = folder.parent.glob(f"test_{folder.name}*.py")
    return sorted(path.relative_to(root).as_posix() for path in paths)


if __name__ == "__main__":
    import pytest

    tests = sorted({test for name in changed_files() for test in matching_tests(name)})
    print("tests of changed files:", *(tests or ["none"]), flush=True)
    sys.exit(pytest.main(["-q", "-n", "2", "--dist", "loadfile", *tests]) if tests else 0)
