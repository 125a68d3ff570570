"""Random images and texts for `experiments.benchmarks.step`."""

import jax
import numpy as np
from jax.sharding import Mesh

from infcl_jax.models import CLIPConfig

# Size of the pool of random images that replayed batches are drawn from, in chunks.
_POOL_CHUNKS = 2


def draw_lengths(source: str, count: int, context_length: int) -> np.ndarray:
    """Draw numbers of tokens of texts: of web captions as CLIP counts them, "laion", or from the lines of a file.

    Web captions have 2 special tokens and about 17 others, log-normal with deviation 0.5.
    """
    rng = np.random.default_rng(0)
    if source == "laion":
        lengths = 2 + np.round(rng.lognormal(np.log(17), 0.5, count))
    else:
        lengths = rng.choice(np.loadtxt(source, ndmin=1), count)
    return np.clip(lengths, 3, context_length).astype(int)


def draw_pairs(config: CLIPConfig, rows: int, lengths: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Draw random images and texts of this process, the texts with lengths of these; None: the context length.

    Returns:
      "image": uint8 `[rows, size, size, 3]`, and "text": int32 token ids `[rows, context_length]`.
    """
    rng = np.random.default_rng(jax.process_index())
    return {"image": _draw_images(rng, config, rows), "text": _draw_texts(rng, config, rows, lengths)}


def _draw_images(rng: np.random.Generator, config: CLIPConfig, rows: int) -> np.ndarray:
    size = config.vision.image_size
    return rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8)


def _draw_texts(rng: np.random.Generator, config: CLIPConfig, rows: int, lengths: np.ndarray | None) -> np.ndarray:
    """Draw token ids; with lengths, texts end with the largest id and are padded with 0."""
    text = config.text
    tokens = rng.integers(0, text.vocab_size, (rows, text.context_length), dtype=np.int32)
    if lengths is None:
        return tokens
    step, last, end = np.arange(text.context_length), rng.choice(lengths, (rows, 1)) - 1, text.vocab_size - 1
    return np.where(step < last, np.minimum(tokens, end - 1), np.where(step == last, end, 0)).astype(np.int32)


class RandomReader:
    """Reader of random pairs, drawn from a small pool of images; for `lengths` see `draw_pairs`.

    Every chunk is a contiguous slice of the pool, so a batch of any size fits into host memory.
    """

    def __init__(
        self, config: CLIPConfig, rows: int, mesh: Mesh, chunk_size: int, lengths: np.ndarray | None = None
    ) -> None:
        self.rows, self._config, self._lengths = rows, config, lengths
        pool = _POOL_CHUNKS * chunk_size * len(mesh.local_devices) // mesh.size
        self._images = _draw_images(np.random.default_rng(jax.process_index()), config, pool)

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """Read the rows of some slices.

        The same slices give the same rows. Images repeat across chunks, texts do not.

        Returns:
          Images and token ids, as from `draw_pairs`.
        """
        count, first = sum(span.stop - span.start for span in spans), spans[0].start
        start = first % (len(self._images) - count + 1)
        rng = np.random.default_rng((jax.process_index(), first))
        text = _draw_texts(rng, self._config, count, self._lengths)
        return {"image": self._images[start : start + count], "text": text}
