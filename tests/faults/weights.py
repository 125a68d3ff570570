"""Load damaged and hostile weights, configurations and tokenizers, and count the outcomes.

    python -m tests.faults.weights --count=420 [--seed=0]

A third of the inputs are weights: safetensors, an index with shards, or a checkpoint of PyTorch, with damaged bytes,
wrong values, or a pickle or zip file made to harm the reader. The others are configurations and tokenizers. Each
input must load, with weights of the right shapes and texts of valid ids, or be refused in one line with `ValueError` or
`OSError`. Each runs in a process of its own, which must neither crash, hang nor take more than `MEMORY` bytes.
"""

import contextlib
import functools
import gzip
import json
import os
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from infcl_jax.data import load_tokenizer
from infcl_jax.models import load_pretrained, variable_shapes
from infcl_jax.models.convert.open_clip import COUNTERS
from infcl_jax.models.convert.tensor_files import read_tensors
from infcl_jax.models.convert.weight_map import flat_shapes
from tests.faults import torch_files
from tests.faults.apart import count_outcomes, counts_of, describe
from tests.faults.case import choose
from tests.faults.json_damage import WRONG, damage_bytes, damage_json

_GOLDEN = Path(__file__).parents[1] / "golden"
_MERGES = "#version: 0.2\nt h\nth e</w>\nc a\nca t</w>\nr e\nre d</w>\n"
_PREPROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "size": {"shortest_edge": 16},
    "do_center_crop": True,
}
_SETTINGS = {"kind": "clip", "context_length": 12, "clean": "lower"}


class Draw(NamedTuple):
    """Input of one process.

    Attributes:
      name: kind of damage.
      load: function that loads the input and checks the result.
    """

    name: str
    load: Callable[[], None]


@functools.cache
def model(library: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors and the configuration of a small model."""
    path = _GOLDEN / f"{library}.safetensors"
    weights = {name.partition("/")[2]: a for name, a in read_tensors(path).items() if name.startswith("weights/")}
    with safe_open(str(path), "numpy") as file:
        return weights, json.loads(file.metadata()["config"])


def load_model(folder: Path) -> None:
    """Load a model and check the shapes of its variables."""
    loaded, variables = load_pretrained(folder, compare_features=False)
    shapes = flat_shapes(variable_shapes(loaded))
    arrays = flat_shapes({name: values for name, values in variables.items() if name != COUNTERS})
    assert arrays.keys() == shapes.keys()
    for name, array in arrays.items():
        assert array.shape == shapes[name].shape, name
        np.asarray(array).sum()  # reads all of it


def _model_files(folder: Path, library: str) -> dict[str, Any]:
    """Write a model; return its JSON files."""
    weights, config = model(library)
    if library.startswith("open_clip"):
        files, name = {"open_clip_config.json": {"model_cfg": config, "preprocess_cfg": {}}}, "open_clip_model"
    else:
        files, name = {"config.json": config, "preprocessor_config.json": _PREPROCESSOR}, "model"
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    (folder / f"{name}.safetensors").write_bytes(save(weights))
    return files


def draw_safetensors(rng: np.random.Generator, folder: Path) -> Draw:
    """Damage the header or the bytes of a safetensors file."""
    _model_files(folder, "open_clip_vit")
    file = folder / "open_clip_model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.3:
        name, damaged = damage_bytes(data[: 2 * length] if rng.random() < 0.5 else data, rng)
    elif rng.random() < 0.2:
        name, damaged = "length", struct.pack("<Q", choose((0, 1, length - 1, 2**31, 2**63, 2**64 - 1), rng)) + data[8:]
    else:
        name, header = damage_json(json.loads(data[8 : 8 + length]), rng)
        damaged = struct.pack("<Q", len(header)) + header.encode("utf-8", "surrogatepass") + data[8 + length :]
    file.write_bytes(damaged)
    return Draw(name, functools.partial(load_model, folder))


def draw_index(rng: np.random.Generator, folder: Path) -> Draw:
    """Damage the index of two shards, or name other files in it."""
    _model_files(folder, "open_clip_vit")
    weights, names = model("open_clip_vit")[0], {}
    (folder / "open_clip_model.safetensors").unlink()
    for number in range(2):
        shard = dict(list(weights.items())[number::2])
        (folder / f"part-{number}.safetensors").write_bytes(save(shard))
        names |= dict.fromkeys(shard, f"part-{number}.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    index = folder / "open_clip_model.safetensors.index.json"
    content = {"metadata": {"total_size": 1000}, "weight_map": names}
    if rng.random() < 0.5:
        others = ("/etc/passwd", "../x.safetensors", "pipe.safetensors", "a\\b.bin", index.name, ".", "", "a\0.bin")
        content["weight_map"] = names | {choose(list(names), rng): choose((*others, "part-1.safetensors", *WRONG), rng)}
        name, text = "shard", json.dumps(content)
    else:
        name, text = damage_json(content, rng)
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    return Draw(name, functools.partial(load_model, folder))


def draw_torch(rng: np.random.Generator, folder: Path) -> Draw:
    """Damage a checkpoint of PyTorch, or write one made to harm the reader."""
    path, weights = folder / "weights.pt", model("open_clip_vit")[0]
    if rng.random() < 0.6:
        name = choose((*torch_files.PICKLES, *torch_files.ARCHIVES), rng)
        torch_files.hostile(path, name)
    elif rng.random() < 0.5:
        name = torch_files.damage(path, weights, rng)
    else:
        torch_files.write_tensors(path, weights)
        name, damaged = damage_bytes(path.read_bytes(), rng)
        path.write_bytes(damaged)
        return Draw(name, functools.partial(_load_same, path, weights))
    return Draw(name, functools.partial(_load_any, path))


def _load_same(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Check the tensors of a file whose checksums show any damage of them."""
    tensors = read_tensors(path)
    assert tensors.keys() == weights.keys()
    for name, array in tensors.items():
        assert array.tobytes() == weights[name].tobytes(), f"{name} differs"


def _load_any(path: Path) -> None:
    """Check that all tensors can be read."""
    size = path.stat().st_size
    for array in read_tensors(path).values():
        assert array.nbytes <= size, "a tensor is larger than the file"
        array.sum()


def draw_config(rng: np.random.Generator, folder: Path) -> Draw:
    """Damage a configuration of a model."""
    library = choose(("open_clip_vit", "open_clip_resnet", "hugging_face_clip", "hugging_face_siglip"), rng)
    files = _model_files(folder, library)
    return Draw(_damage_file(files, folder, rng), functools.partial(load_model, folder))


def draw_tokenizer(rng: np.random.Generator, folder: Path) -> Draw:
    """Damage a file of a saved tokenizer, or of one of Hugging Face or SentencePiece."""
    kind = choose(("clip", "hf", "sentencepiece"), rng)
    (folder / "merges.txt").write_text(_MERGES)
    load_tokenizer(f"clip:{folder / 'merges.txt'}").save(folder)
    with np.load(_GOLDEN / "transformers_tokens.npz") as stored:
        (folder / "tokenizer.json").write_bytes(stored["bert_json"].tobytes())
        (folder / "spiece.model").write_bytes(stored["sentence_piece"].tobytes())
    files: dict[str, Any] = {"tokenizer_settings.json": _SETTINGS | {"kind": kind}}
    files |= {"tokenizer_config.json": {"pad_token": "[PAD]" if kind == "hf" else "</s>"}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    binary = {"clip": "merges.txt", "hf": "tokenizer.json", "sentencepiece": "spiece.model"}[kind]
    json_file = {"clip": "vocab.json", "hf": "tokenizer.json"}.get(kind)
    load: Callable[[], None] = functools.partial(_load_tokenizer, str(folder))
    if kind == "clip" and rng.random() < 0.2:
        bomb = folder / "bomb.txt.gz"
        bomb.write_bytes(gzip.compress(bytes(2**20)) * (torch_files.BOMB >> 20))
        return Draw("clip: compressed zeros", functools.partial(_load_tokenizer, f"clip:{bomb}"))
    if rng.random() < 0.3:
        name, damaged = damage_bytes((folder / binary).read_bytes(), rng)
        (folder / binary).write_bytes(damaged)
        return Draw(f"{kind}: {name}", load)
    if json_file and rng.random() < 0.6:
        files = {json_file: _pruned(json.loads((folder / json_file).read_text()), rng)}
    return Draw(f"{kind}: {_damage_file(files, folder, rng)}", load)


def _pruned(content: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Move the long vocabulary of a tokenizer behind its other values, so that damage hits those too."""
    if "model" in content and rng.random() < 0.8:
        content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:8])
    return content


def _load_tokenizer(spec: str) -> None:
    tokenizer = load_tokenizer(spec)
    ids = tokenizer(["a cat", ""])
    assert ids.shape == (2, tokenizer.context_length), "the ids have another shape"
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size, "an id is out of range"
    assert isinstance(tokenizer.decode(ids[0]), str)


def _damage_file(files: dict[str, Any], folder: Path, rng: np.random.Generator) -> str:
    """Damage one of the JSON files; return the name of the damage."""
    file = choose(list(files), rng)
    if rng.random() < 0.1:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
        return f"{file}: FIFO"
    if rng.random() < 0.15:
        name, data = damage_bytes(json.dumps(files[file]).encode(), rng)
    else:
        name, text = damage_json(files[file], rng)
        data = text.encode("utf-8", "surrogatepass")
    (folder / file).write_bytes(data)
    return f"{file}: {name}"


DRAWS: dict[str, Callable[[np.random.Generator, Path], Draw]] = {
    "safetensors": draw_safetensors,
    "index": draw_index,
    "torch": draw_torch,
    "config": draw_config,
    "tokenizer": draw_tokenizer,
}
KINDS = ("safetensors", "config", "tokenizer", "index", "config", "tokenizer", "torch", "config", "tokenizer")


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Draw the input of a seed and load it.

    Returns:
      "name" of the damage, "counts" of the outcome, and "problem", "" if the contract holds.
    """
    case = Draw("?", lambda: None)
    try:
        case = DRAWS[kind](np.random.default_rng(seed), folder)
        with contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the zip files are damaged
            case.load()
    except (ValueError, OSError) as error:
        line = str(error)
        problem = "" if line and "\n" not in line and "\x1b" not in line and len(line) < 2000 else f"no line: {line!r}"
        outcome = "no file" if isinstance(error, FileNotFoundError) else "refused"
        return {"name": case.name, "counts": {outcome: 1}, "line": line[:200], "problem": problem[:300]}
    except BaseException as error:
        return {"name": case.name, "counts": {"opaque": 1}, "problem": describe(error)}
    touched = "something is written" if (folder / "touched").exists() else ""
    return {"name": case.name, "counts": {"loaded": 1}, "problem": touched}


def main() -> None:
    """Load the inputs of the flags and print the outcomes."""
    arguments = counts_of(__doc__, 420, lines="print the message of every refusal")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded|os.fork")  # the forks start no computation
    for library in ("open_clip_vit", "open_clip_resnet", "hugging_face_clip", "hugging_face_siglip"):
        with tempfile.TemporaryDirectory() as folder:  # traces the models before the forks
            _model_files(Path(folder), library)
            load_model(Path(folder))
    count_outcomes(run, KINDS, arguments)


if __name__ == "__main__":
    main()
