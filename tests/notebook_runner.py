"""Execution of the notebooks in empty folders outside the checkout.

    python tests/notebook_runner.py                     # all, stored with their outputs
    python tests/notebook_runner.py quickstart          # one
    python tests/notebook_runner.py --wheel=dist/X.whl  # not stored; each in a new environment, by its install cell

Each notebook runs in a fresh kernel on the CPU. The library is the only part of the checkout that it can import.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import nbclient
import nbformat
from open_clip_folder import open_clip_folder

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LIMIT = 180  # seconds per cell
INSTALL_LIMIT = 900  # seconds per cell with a wheel, whose install cell installs about 1 GB
LARGEST_OUTPUT = 200_000  # bytes of one stored picture or text


def execute(name: str, wheel: Path | None = None, steps: int | None = None) -> nbformat.NotebookNode:
    """Execute a notebook.

    Args:
      name: notebook, such as "quickstart".
      wheel: wheel or clone that its install cell gets, in a new environment; None: the library of this checkout.
      steps: training steps in place of its own; None: its own.

    Returns:
      The notebook with its outputs.

    Raises:
      CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    for cell in notebook.cells if steps else ():
        cell.source = re.sub(r'"total_steps": \d+', f'"total_steps": {steps}', cell.source)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "work")
        folder.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}
        environ |= {
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(Path(temporary, "cache")),
            "OPENCLIP_MODEL": str(open_clip_folder("vit", Path(temporary, "openclip"))),
        }
        with _checkout(temporary) if wheel is None else _environment(temporary, wheel) as (kernel, more):
            client = nbclient.NotebookClient(
                notebook,
                timeout=LIMIT if wheel is None else INSTALL_LIMIT,
                kernel_name=kernel,
                resources={"metadata": {"path": folder}},
            )
            client.execute(env=environ | more)
    return notebook


@contextlib.contextmanager
def _checkout(temporary: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the kernel of this Python, and its environment variables with the library alone."""
    packages = Path(temporary, "packages")
    packages.mkdir()
    (packages / "infcl_jax").symlink_to(ROOT / "infcl_jax")
    yield "python3", {"PYTHONPATH": str(packages)}


@contextlib.contextmanager
def _environment(temporary: str, wheel: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the kernel of a new environment, whose variables lead the install cell to the wheel."""
    folder = Path(temporary, "venv")
    venv.create(folder, with_pip=True)
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    python = [str(folder / "bin" / "python"), "-m"]
    for command in (["pip", "install", "--quiet", "ipykernel"], ["ipykernel", "install", f"--prefix={folder}"]):
        subprocess.run([*python, *command], env=os.environ | constraints, check=True, stdout=subprocess.DEVNULL)
    with mock.patch.dict(os.environ, {"JUPYTER_PATH": str(folder / "share" / "jupyter")}):
        yield "python3", constraints | {"INFCL_JAX_SOURCE": wheel.resolve().as_uri()}


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """Return the PNG files among the outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(data) for data in shown]


def text(notebook: nbformat.NotebookNode) -> str:
    """Return the printed and displayed text of all cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook with its outputs, without stderr and times of execution.

    Raises:
      ValueError: an output is too large.
    """
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{number}"
        if cell.cell_type == "code":  # without progress bars and native logs
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if (size := len(json.dumps(output))) > LARGEST_OUTPUT:
                raise ValueError(
                    f"expected outputs of at most {LARGEST_OUTPUT} bytes, got {size} in cell {number} of {path.name}; "
                    "draw smaller pictures"
                )
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


def main() -> None:
    """Execute notebooks and store them, or check them with a wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks, such as quickstart; all by default")
    parser.add_argument("--wheel", type=Path, help="wheel or clone for the install cells; outputs are not stored")
    flags = parser.parse_args()
    for name in flags.names or NOTEBOOKS:
        start = time.monotonic()
        notebook = execute(name, flags.wheel)
        if flags.wheel is None:
            store(notebook, NOTEBOOKS[name])
        print(f"{name}: {time.monotonic() - start:.0f} s, {len(pictures(notebook))} pictures", flush=True)


if __name__ == "__main__":
    main()
