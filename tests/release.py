"""Check the wheel and the sdist of a release.

    python tests/release.py dist

Their files must be those of the repository, and the wheel must work outside the checkout. `make release-check` builds
them first and checks their metadata with twine.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOKE_TEST = ROOT / "tests" / "release_smoke.py"
# Files of the sdist besides the library, from pyproject.toml, MANIFEST.in and setuptools.
_SDIST = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}


def library_files() -> set[str]:
    """List the files of the library that git tracks, such as "infcl_jax/ops/common/checks.py"."""
    tracked = subprocess.run(["git", "ls-files", "infcl_jax"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(tracked.stdout.splitlines())


def version() -> str:
    """Return the version in `pyproject.toml`, which `CITATION.cff` must have too.

    Raises:
      ValueError: it has another one.
    """
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if f"\nversion: {number}\n" not in (ROOT / "CITATION.cff").read_text():
        raise ValueError(f"expected version {number} of pyproject.toml in CITATION.cff, got another one; change it")
    return number


def check_names(kind: str, names: set[str], expected: set[str]) -> None:
    """Check that an archive has the expected files and no others.

    Raises:
      ValueError: files are missing or unexpected.
    """
    if names != expected:
        missing, unexpected = sorted(expected - names), sorted(names - expected)
        raise ValueError(f"expected the {kind} to hold the library, got {missing=}, {unexpected=}; see pyproject.toml")


def wheel_files(wheel: Path) -> set[str]:
    """List the files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def sdist_files(sdist: Path) -> set[str]:
    """List the files of an sdist without the metadata of setuptools."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return {name for name in names if ".egg-info/" not in name}


def check_installation(wheel: Path, number: str) -> None:
    """Install a wheel into a new environment outside the checkout and run `release_smoke.py` there.

    Raises:
      CalledProcessError: pip or the smoke test failed.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_", "XLA_"))}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        python = [str(Path(folder, "venv", "bin", "python")), "-I"]  # -I: only installed packages can be imported
        for command in (
            ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[digits]"],
            ["-m", "pip", "check"],
            [str(SMOKE_TEST), number, str(ROOT)],
        ):
            subprocess.run([*python, *command], cwd=folder, env=environ | {"JAX_PLATFORMS": "cpu"}, check=True)


def check_release(dist: Path) -> None:
    """Check the one wheel and the one sdist in a folder.

    Raises:
      ValueError: an archive has other files than the library, or versions differ.
      CalledProcessError: the wheel cannot be installed and used.
    """
    number = version()
    wheel, sdist = dist / f"infcl_jax-{number}-py3-none-any.whl", dist / f"infcl_jax-{number}.tar.gz"
    check_names("wheel", wheel_files(wheel), library_files())
    check_names("sdist", sdist_files(sdist), library_files() | _SDIST)
    check_installation(wheel.resolve(), number)


if __name__ == "__main__":
    check_release(Path(sys.argv[1]))
    print("the wheel and the sdist are complete, and the wheel works outside the checkout")
