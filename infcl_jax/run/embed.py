"""Features of the images or captions of a dataset, written to a file."""

import hashlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infcl_jax.data import BadRecordError, Source, eval_batches
from infcl_jax.data.bad_records import BAD_RECORDS, bad_record_limit
from infcl_jax.data.parallelism import choose_parallelism, usable_cores
from infcl_jax.data.sources import is_captioned, record_key
from infcl_jax.evaluation.feature_files import (
    FeatureRows,
    check_feature_file,
    merge_shards,
    shard_counts,
    write_shard,
)
from infcl_jax.evaluation.features import Batch, TowerEncoder, encode_caption_rows, encode_image_batches
from infcl_jax.inference.encoder import Encoder
from infcl_jax.runtime.console import say
from infcl_jax.runtime.file_io import read_json, replace_text
from infcl_jax.runtime.processes import gather, is_lead, local_processes
from infcl_jax.runtime.progress import Progress

_SHARD_BATCHES = 16  # batches between two writes, which a killed command repeats
_PROBED = 64  # samples whose contents identify a source
_MANIFEST = "manifest.json"

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

    Every process must call it. The lead process writes. Finished shards are in the folder .FILE.shards next to the
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
    folder = output.with_name(f".{output.name}.shards")
    rows = -(-encoder.batch_size // encoder.mesh.size) * encoder.mesh.size
    shard_rows = rows * _SHARD_BATCHES
    shards = [folder / f"{number:06d}.safetensors" for number in range(-(-len(source) // shard_rows))]
    done = _finished(output, folder, shards, _identity(encoder, source, captions, shard_rows))
    bad = sum(shard_counts(shard)["bad"] for shard in shards[:done]) if is_lead() else 0
    bad = gather(bad)[0]
    limit = bad_record_limit(max_bad_records, source)
    local = local_processes()
    batches = eval_batches(
        source,
        tokenizer=encoder.tokenizer if captions else None,
        image_size=None if captions else encoder.image_size,
        batch_size=rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        first_batch=done * _SHARD_BATCHES,
        skip_bad=True,
        parallelism=choose_parallelism(
            batch_bytes=rows // jax.process_count() * 3 * encoder.image_size**2,
            num_workers=num_workers,
            cores=max(1, usable_cores() // local.cores),
            processes=local.host,
        ),
        resize=encoder.resize,
        max_image_pixels=encoder.max_image_pixels,
    )
    progress = Progress(source.name, len(source), "images", say, done=min(done * shard_rows, len(source)))
    encoded = (_encoded_captions if captions else _encoded_images)(encoder, _reported(batches), progress)
    for number, (feature, index) in enumerate(encoded, start=done):
        attempted = min((number + 1) * shard_rows, len(source)) - number * shard_rows
        missing = attempted - len(np.unique(index))
        bad += missing
        if bad > limit:
            raise BadRecordError(f"{bad} bad records, more than the {limit} of --max_bad_records; check them")
        if is_lead():
            keys = [record_key(source, i) for i in index.tolist()]
            write_shard(shards[number], FeatureRows(feature, index, keys), {"bad": missing})
    if bad == len(source):
        raise BadRecordError(f"expected images in {source.name}, got {bad} bad records; check the data")
    if not is_lead():
        return ""
    shape = merge_shards(output, shards)
    shutil.rmtree(folder)
    seconds = time.monotonic() - start
    unit = "captions" if captions else "images"
    line = f"{source.name}: {unit} {list(shape)} in {seconds:.1f} s, {output}"
    return f"{line}; left out: {bad} bad records" if bad else line


def _encoded_images(
    encoder: Encoder, batches: Iterable[Batch], progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Encode the images of each shard; yield features and indices."""
    encode = TowerEncoder(encoder.model, "encode_image", encoder.dim)
    encoded = encode_image_batches(encode, encoder.variables, batches, encoder.mesh)

    def counted() -> Iterator[dict[str, np.ndarray]]:
        for batch in encoded:
            progress.add(len(batch["index"]))
            yield batch

    for shard in itertools.batched(counted(), _SHARD_BATCHES):
        yield np.concatenate([batch["feature"] for batch in shard]), np.concatenate([batch["index"] for batch in shard])


def _encoded_captions(
    encoder: Encoder, batches: Iterable[Batch], progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Encode the captions of each shard; yield features and indices of the images."""
    encode = TowerEncoder(encoder.model, "encode_text", encoder.dim)
    for shard in itertools.batched(batches, _SHARD_BATCHES):
        captions = {key: np.concatenate([batch[key] for batch in shard]) for key in ("text", "text_index")}
        rows = len(shard[0]["mask"])
        encoded = list(encode_caption_rows(encode, encoder.variables, captions, encoder.mesh, rows))
        index = np.concatenate([batch["index"] for batch in encoded] or [np.zeros(0, np.int64)])
        order = np.argsort(index, kind="stable")
        feature = np.concatenate([batch["feature"] for batch in encoded] or [np.zeros((0, encoder.embed_dim))])
        progress.add(len(np.unique(index)))
        yield feature[order], index[order]


def _reported(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Log the bad records of each batch."""
    for batch in batches:
        for message in batch[BAD_RECORDS]["message"]:
            _logger.warning("%s; left out", message)
        yield batch


def _identity(encoder: Encoder, source: Source, captions: bool, shard_rows: int) -> dict[str, Any]:
    """Describe what determines the rows of a shard."""
    digest = hashlib.sha256()
    for index in np.unique(np.linspace(0, len(source) - 1, _PROBED).astype(int)).tolist():
        digest.update(f"{index} {record_key(source, index)}".encode("utf-8", "surrogateescape"))
        try:
            example = source[index]
        except BadRecordError:
            continue
        image = example["image"]
        digest.update(encoder.tokenizer(example["captions"]).tobytes() if captions else bytes(memoryview(image)))
    return {
        "model": encoder.fingerprint(),
        "source": digest.hexdigest(),
        "samples": len(source),
        "captions": captions,
        "--batch_size": shard_rows,
    }


def _finished(output: Path, folder: Path, shards: list[Path], identity: dict[str, Any]) -> int:
    """Return the number of finished shards, the same on every process.

    Raises:
      ValueError: the output exists, or the shards are of another model or source.
    """
    error, done = "", 0
    if is_lead():
        manifest = folder / _MANIFEST
        if manifest.is_file():
            saved = read_json(manifest)
            if changed := [name for name in identity if saved.get(name) != identity[name]]:
                error = f"expected {folder} to be of the same {', '.join(changed)}, got others; give them or delete it"
        elif output.exists():
            error = f"expected a new --output, got {output}, which exists; delete it or choose another"
        else:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(manifest, json.dumps(identity, indent=2))
        done = sum(1 for _ in itertools.takewhile(Path.exists, shards))
    done = gather(-1 if error else done)[0]
    if done < 0:
        raise ValueError(error or "the lead process refused the output; see its error")
    if done:
        say(f"continues after {done} of {len(shards)} shards in {folder}")
    return done
