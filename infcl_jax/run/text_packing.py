"""Packing of a run's texts: which are packed, and in how many rows.

The rows are chosen by a profile of the first texts, which is the same on any number of processes.
"""

import concurrent.futures
import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from infcl_jax.data import Packing, PairTexts
from infcl_jax.data.iterator import sample_order
from infcl_jax.data.packing import MOST, ROW_LENGTH, PackedEntry, TextPacker
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.models.clip import row_shapes
from infcl_jax.models.flops import layer_flops
from infcl_jax.models.text_pair import text_tower
from infcl_jax.runtime.processes import gather

if TYPE_CHECKING:
    from infcl_jax.run.base import Run

# (global row, sample index) pairs -> token ids by entry of a batch
TextReader = Callable[[Sequence[tuple[int, int]]], Mapping[str, np.ndarray]]

_PROFILE = 4096  # rows of the data that are read
_READ = 64  # of these in one call


@dataclasses.dataclass(frozen=True)
class TextPacking:
    """How the texts of a run are encoded.

    Attributes:
      packed: packing of each entry of a batch that is packed.
      padded: reason for each entry that is not.
    """

    packed: Mapping[str, PackedEntry]
    padded: Mapping[str, str]

    def packer(self, devices: int) -> TextPacker:
        """Return the packer of this process's batches, for its number of devices."""
        return TextPacker(self.packed, devices)

    def __str__(self) -> str:
        """Describe the packing of each entry.

        An example is "text packed in 12 rows of 128 tokens for 64 texts (24.0 each), mean length 21.2".
        """
        packed = [f"{name} packed in {e.packing}, mean length {e.tokens:.1f}" for name, e in self.packed.items()]
        return "; ".join([*packed, *(f"{name} padded, since {reason}" for name, reason in self.padded.items())])


def text_towers(model: Any, prefix: str = "") -> dict[str, Any]:
    """Return a model's text encoders: "text", or "query" and "passage"."""
    names = row_shapes(model, 1).keys() - {"image"}
    return {f"{prefix}{name}": text_tower(model, name) for name in sorted(names)}


def counts_alike(tower: Any, other: Any) -> bool:
    """Return whether a tower counts the tokens that another one counts."""
    marks = ("end_token", "pad_id", "attends_to_padding")
    return type(tower) is type(other) and all(getattr(tower, m, None) == getattr(other, m, None) for m in marks)


def choose_packing(run: "Run", devices: int) -> TextPacking:
    """Choose how the texts of a run are encoded; all processes must call it.

    Args:
      run: parts of the run, with its source.
      devices: number of devices over which the batch is sharded.
    """
    run.config.grad_cache.check_batch(run.config.batch_size, devices)
    towers = {name: tower for name, tower in run.text_towers.items() if not tower.attends_to_padding}
    padded = dict.fromkeys(run.text_towers.keys() - towers, "the tower attends to padding")
    packed = {}
    for name, (lengths, length) in _profile(run, towers).items() if towers else ():
        encoder = name.removeprefix("teacher_")
        rows = run.config.batch_size * (run.passages if encoder == "passage" else 1)
        chunk = min(run.config.grad_cache.chunk_of(encoder) or rows, rows)
        row_length = -(-length // ROW_LENGTH) * ROW_LENGTH
        packing = Packing.of(lengths, chunk // devices, row_length, shards=devices * -(-rows // chunk))
        config, rows_per_text = towers[name].config, packing.tokens_per_text / row_length
        if rows_per_text * layer_flops(config, row_length) <= MOST * layer_flops(config, length):
            packed[name] = PackedEntry(packing, towers[name].lengths, float(lengths.mean()))
        else:
            padded[name] = f"packing would leave {packing.tokens_per_text:.1f} of {length} tokens, in longer rows"
    return TextPacking(packed, padded)


def _profile(run: "Run", towers: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, int]]:
    """Return the lengths of the first texts, and their padded length.

    Each process reads a share of the texts.
    """
    config, read = run.config, run.text_reader()
    order = sample_order(run.source, config.batch_size, config.seed)
    rows = [(row, int(order[row])) for row in range(min(_PROFILE, len(order)))]
    own = rows[jax.process_index() :: jax.process_count()]
    with concurrent.futures.ThreadPoolExecutor(config.num_threads or usable_cores()) as threads:
        chunks = list(threads.map(read, itertools.batched(own, _READ)))
    lengths = {name: [n for c in chunks for n in tower.lengths(c[name]).tolist()] for name, tower in towers.items()}
    shares = gather(lengths)
    # Sorted, so that the rows do not depend on the number of processes.
    every = {name: np.sort(np.concatenate([share[name] for share in shares])) for name in towers}
    return {name: (np.maximum(every[name], 1), chunks[0][name].shape[1]) for name in towers}


def silent[Texts: Any](texts: Texts) -> Texts:
    """Copy a tokenization that neither counts nor warns of cut texts."""
    if isinstance(texts, PairTexts):
        return dataclasses.replace(texts, tokenizer=silent(texts.tokenizer))
    if isinstance(texts, BaseTokenizer):
        texts = copy.copy(texts)
        texts.truncated = 1  # only the first one warns
    return texts
