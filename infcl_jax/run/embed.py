"""Features of the images or captions of a dataset, written to a file."""

import functools
import hashlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infcl_jax.data import BadRecordError, FeatureStore, Source, TowerInput, eval_batches
from infcl_jax.data.dataset_identity import hash_samples
from infcl_jax.data.parallelism import choose_parallelism, usable_cores
from infcl_jax.data.reader import BAD_RECORDS, bad_record_limit
from infcl_jax.data.sources import is_captioned, record_key
from infcl_jax.inference.encoder import Encoder
from infcl_jax.inference.feature_files import check_feature_file, write_features
from infcl_jax.inference.features import Batch, TowerEncoder, encode_caption_rows, encode_image_batches
from infcl_jax.runtime.console import say
from infcl_jax.runtime.file_io import read_json, replace_text
from infcl_jax.runtime.processes import gather, is_lead, local_processes
from infcl_jax.runtime.progress import Progress

_SEGMENT_BATCHES = 16  # batches between two writes, which a killed command repeats
_PROBES = 64  # samples whose contents identify a source
_IDENTITY_FILE = "identity.json"

_logger = logging.getLogger("infcl_jax.embed")


def embed(
    encoder: Encoder,
    source: Source,
    output: str | Path,
    *,
    captions: bool = False,
    num_workers: int | None = None,
    max_bad_records: float | None = None,
) -> str:
    """Write the features of a source to a file, resuming an interrupted call.

    Every process must call it. The lead process writes. Finished segments are in the folder .FILE.shards next to the
    output.

    Examples:
      >>> encoder, source = infcl_jax.load("runs/digits"), load_source("photos", "train")
      >>> summary = infcl_jax.embed(encoder, source, "embedded.npy")
      >>> read_features("embedded.npy").feature.shape
      (8, 16)

    Args:
      encoder: the model.
      source: images and captions.
      output: feature file, see `infcl_jax.evaluation.read_features`.
      captions: whether to encode all captions instead of the images.
      num_workers: reading processes of each process; 0: threads; None: chosen from the cores.
      max_bad_records: largest number of bad records, which are left out; below 1: a fraction of the images; None: 1 %
        of them, at least 100.

    Returns:
      A one-line summary.

    Raises:
      ValueError: the output exists, its extension is unknown, its finished rows are of another model or source, or the
        source has no captions to encode.
      BadRecordError: there are more bad records than `max_bad_records`, or no good ones.
    """
    check_feature_file(output)
    if captions and not is_captioned(source):
        raise ValueError(f"expected a dataset with captions with --captions, got {source.name}, which has none")
    output, start = Path(output), time.monotonic()
    rows = -(-encoder.batch_size // encoder.mesh.size) * encoder.mesh.size
    segment_rows = rows * _SEGMENT_BATCHES
    identity = _identity(encoder, source, captions, segment_rows)
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    store = FeatureStore(output.with_name(f".{output.name}.shards"), key, len(source), segment_rows)
    done, bad = _finished(output, store, identity)
    limit = bad_record_limit(max_bad_records, source)
    local = local_processes()
    batches = eval_batches(
        source,
        tokenizer=encoder.tokenizer if captions else None,
        image_size=None if captions else encoder.image_size,
        batch_size=rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        first_batch=done * _SEGMENT_BATCHES,
        skip_bad=True,
        parallelism=choose_parallelism(
            rows // jax.process_count() * 3 * encoder.image_size**2,
            num_workers=num_workers,
            cores=max(1, usable_cores() // local.cores),
            processes_per_host=local.host,
        ),
        resize=encoder.resize,
        max_image_pixels=encoder.max_image_pixels,
    )
    progress = Progress(source.name, len(source), "images", say, done=min(done * segment_rows, len(source)))
    encode = _encoded_captions if captions else _encoded_images
    none = np.zeros((0, encoder.embed_dim), np.float32)
    for segment, encoded in enumerate(encode(encoder, _reported(batches), progress), start=done):
        feature = np.concatenate([none, *(batch["feature"] for batch in encoded)])
        index = np.concatenate([np.zeros(0, np.int64), *(batch["index"] for batch in encoded)])
        samples, order = store.segment_range(segment), np.argsort(index, kind="stable")
        counts = np.bincount(index - samples.start, minlength=len(samples))
        bad += int(np.sum(counts == 0))
        if bad > limit:
            raise BadRecordError(f"{bad} bad records, more than the {limit} of --max_bad_records; check them")
        if is_lead():
            store.write(segment, {"features": feature[order], "starts": np.cumsum([0, *counts], dtype=np.int64)})
    if bad == len(source):
        raise BadRecordError(f"expected images in {source.name}, got {bad} bad records; check the data")
    if not is_lead():
        return ""
    shape = write_features(output, store, functools.partial(record_key, source))
    shutil.rmtree(store.folder)
    seconds = time.monotonic() - start
    unit = "captions" if captions else "images"
    line = f"{source.name}: {unit} {list(shape)} in {seconds:.1f} s, {output}"
    return f"{line}; left out: {bad} bad records" if bad else line


def _encoded_images(encoder: Encoder, batches: Iterable[Batch], progress: Progress) -> Iterator[Sequence[Batch]]:
    """Encode the images of each segment, with their indices."""
    encode = TowerEncoder(encoder.model, "encode_image", encoder.dim)
    encoded = encode_image_batches(encode, encoder.variables, batches, encoder.mesh)

    def counted() -> Iterator[Batch]:
        for batch in encoded:
            progress.add(len(batch["index"]))
            yield batch

    return itertools.batched(counted(), _SEGMENT_BATCHES)


def _encoded_captions(encoder: Encoder, batches: Iterable[Batch], progress: Progress) -> Iterator[Sequence[Batch]]:
    """Encode the captions of each segment, with the indices of their images."""
    encode = TowerEncoder(encoder.model, "encode_text", encoder.dim)
    for segment in itertools.batched(batches, _SEGMENT_BATCHES):
        captions = {key: np.concatenate([batch[key] for batch in segment]) for key in ("text", "text_index")}
        rows = len(segment[0]["mask"])
        encoded = list(encode_caption_rows(encode, encoder.variables, captions, encoder.mesh, rows))
        progress.add(len({index for batch in encoded for index in batch["index"].tolist()}))
        yield encoded


def _reported(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Log the bad records of each batch."""
    for batch in batches:
        for message in batch[BAD_RECORDS]["message"]:
            _logger.warning("%s; left out", message)
        yield batch


def _identity(encoder: Encoder, source: Source, captions: bool, segment_rows: int) -> dict[str, Any]:
    """Describe what determines the rows of a segment."""
    samples = hashlib.sha256()
    hash_samples(samples, source, count=_PROBES)
    tokenizer = {"tokenizer": TowerInput("text", 0, encoder.tokenizer).fingerprint()} if captions else {}
    return {
        "model": encoder.fingerprint(),
        **tokenizer,
        "source": samples.hexdigest(),
        "samples": len(source),
        "captions": captions,
        "--batch_size": segment_rows,
    }


def _finished(output: Path, store: FeatureStore, identity: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of finished segments and of their bad records, the same on every process.

    Raises:
      ValueError: the output exists, or the segments are of another model or source.
    """
    error, done, bad, path = "", 0, 0, store.folder / _IDENTITY_FILE
    if is_lead():
        if path.is_file():
            saved = read_json(path)
            if changed := [name for name in identity if saved.get(name) != identity[name]]:
                names = ", ".join(changed)
                error = f"expected {store.folder} to be of the same {names}, got others; give them or delete it"
        elif output.exists():
            error = f"expected a new --output, got {output}, which exists; delete it or choose another"
        else:
            store.folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(identity, indent=2))
        while not error and done < store.segments and store.problem(done) is None:
            bad += len(store.segment_range(done)) - len(np.unique(store.rows(done)[1]))
            done += 1
    done, bad = gather([-1 if error else done, bad])[0]  # of the lead process
    if done < 0:
        raise ValueError(error or "the lead process refused the output; see its error")
    if done:
        say(f"continues after {done} of {store.segments} shards in {store.folder}")
    return done, bad
