"""Feed damaged and hostile inputs to the data pipeline and count the outcomes.

    python -m tests.faults.inputs --count=700 [--seed=0]

Each input is a small dataset with images, tar files and their indexes, tables and the paths in them, or captions that
are damaged or hostile, or with special files such as FIFOs. It goes through `load_source` and a batch of
`train_iterator`. Every sample must be read with the right pixels or be a bad record, or the dataset must be refused in
one line. Each input runs in a process of its own, which must neither crash, hang nor take more than `MEMORY` bytes.
"""

import functools
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from infcl_jax.data import BadRecordError, Source, load_source, load_tokenizer, train_iterator
from infcl_jax.data.decode import decode_example
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.training import train_bpe
from tests.faults import captions, images, special_files, tables, tars
from tests.faults.apart import count_outcomes, counts_of, describe
from tests.faults.case import Case

SIDE = 16  # pixels
DRAWS: dict[str, Callable[[np.random.Generator, Path], Case]] = {
    "image": images.draw,
    "tar": tars.draw,
    "table": tables.draw,
    "caption": captions.draw,
    "path": tables.draw_paths,
    "index": tars.draw_index,
    "special file": special_files.draw,
}
_VOCABULARIES = Path(__file__).parents[1] / "golden" / "transformers_tokens.npz"
TOKENIZERS = ("bytes", "clip", "trained", "hf", "sentencepiece")


@functools.cache
def tokenizer(kind: str) -> BaseTokenizer:
    """Load a small tokenizer of a kind; "clip" is CLIP's own."""
    if kind in ("bytes", "clip"):
        return load_tokenizer(kind, 24)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "trained":
            return train_bpe(["the cat sat on the red mat", "the hat of the cat"] * 4, 530, folder, context_length=24)
        with np.load(_VOCABULARIES) as stored:
            Path(folder, "tokenizer.json").write_bytes(stored["bert_json"].tobytes())
            Path(folder, "spiece.model").write_bytes(stored["sentence_piece"].tobytes())
        return load_tokenizer(f"{kind}:{folder}" + ("/spiece.model" if kind == "sentencepiece" else ""), 24)


def outcome(case: Case, seed: int) -> dict[str, int]:
    """Read a case and count its samples by outcome.

    Raises:
      AssertionError: the contract is broken.
    """
    try:
        source = load_source(case.dataset, "train")
    except (ValueError, FileNotFoundError) as error:
        assert_one_line(error)
        assert case.may_be_refused, f"refused: {error}"
        return {"refused": 1}
    good, bad = _read_all(source, case)
    counts = {"read": len(good), "bad": len(bad), **getattr(source, "dropped", {})}
    kind = TOKENIZERS[seed % len(TOKENIZERS)]
    text = tokenizer(kind)
    options: dict[str, Any] = {"augmentation": None} if seed % 2 else {}
    iterator = train_iterator(
        source,
        tokenizer=text,
        image_size=SIDE,
        batch_size=len(source),
        seed=seed,
        num_workers=0,
        num_threads=1,
        max_bad_records=len(source),
        **options,
    )
    try:
        batch = next(iterator)
    except BadRecordError as error:
        assert_one_line(error)
        assert len(bad) == len(source) or len(bad) >= 16, f"all bad: {error}"
        return counts
    finally:
        iterator.close()
    assert set(batch["index"].tolist()) == set(good), "other records are read in a batch"
    assert iterator.bad_records.indices() == bad, "other records are bad in a batch"
    assert batch["image"].shape == (len(source), SIDE, SIDE, 3) and batch["image"].dtype == np.uint8
    assert batch["text"].shape == (len(source), text.context_length), "the texts have another shape"
    assert 0 <= batch["text"].min() <= batch["text"].max() < text.vocab_size, "a token id is out of range"
    return counts


def _read_all(source: Source, case: Case) -> tuple[list[int], list[int]]:
    """Read and check every sample; return the good and the bad indices."""
    good, bad = [], []
    expected = dict(case.expected)
    for index in range(len(source)):
        try:
            example = decode_example(source, index)
        except BadRecordError as error:
            assert_one_line(error)
            bad.append(index)
            continue
        good.append(index)
        image = example["image"]
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        for caption in example["captions"]:
            assert caption not in case.refused, f"{caption[:40]!r} must be bad"
            pixels = expected.pop(caption, None)
            if pixels is not None:
                assert image.shape == pixels.shape, f"{caption!r} has shape {image.shape}, expected {pixels.shape}"
                difference = np.abs(image.astype(int) - pixels).max()
                assert difference <= case.tolerance, f"{caption!r} differs by {difference} levels"
    assert not expected, f"not read: {', '.join(expected)}"
    return good, bad


def assert_one_line(error: Exception) -> None:
    """Check that an error message is one line of text."""
    assert str(error) and "\n" not in str(error) and len(str(error)) < 2000, repr(str(error))[:400]


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Draw the case of a seed and read it.

    Returns:
      "name" of the case, "counts" of its samples, and "problem", "" if the contract holds.
    """
    case = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
            (folder / "input").mkdir()
            case = DRAWS[kind](np.random.default_rng(seed), folder / "input")
            counts = outcome(case, seed)
        assert os.listdir(folder) == ["input"], "something is written outside of the folder of the input"
        return {"name": case.name, "counts": counts, "problem": ""}
    except BaseException as error:
        return {"name": case.name if case else "?", "counts": {}, "problem": describe(error)}


def main() -> None:
    """Read the inputs of the flags and print the outcomes."""
    arguments = counts_of(__doc__, 700)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # the forks run no JAX
    for kind in TOKENIZERS:
        tokenizer(kind)  # before the forks
    count_outcomes(run, tuple(DRAWS), arguments)


if __name__ == "__main__":
    main()
