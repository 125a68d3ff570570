"""Evaluation suite: zero-shot accuracy, retrieval recall and split loss."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import Source, classes, eval_batches, load_source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.sources import is_captioned
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.distributed import is_lead
from infcl_jax.evaluation.contrastive import batch_loss, split_loss
from infcl_jax.evaluation.features import Encode, Features, TowerEncoder, encode_split
from infcl_jax.evaluation.plots import plot_retrieval_grid
from infcl_jax.evaluation.retrieval import retrieval_recall
from infcl_jax.evaluation.zero_shot import class_embeddings, zero_shot_accuracy

GRID_QUERIES = 8  # captions in the retrieval plot


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of the evaluation suite.

    Attributes:
      batch_size: images or captions encoded at once, over all devices.
      retrieval_dataset: dataset of `infcl_jax.data.load_source` for retrieval and the split loss; None: skip both.
      retrieval_split: split for retrieval and the split loss.
      gallery: number of first images of the split used for retrieval, with all their captions; None: all.
      zero_shot_dataset: dataset with classes for zero-shot classification; None: skip.
      zero_shot_split: split for zero-shot classification.
    """

    batch_size: int = 256
    retrieval_dataset: str | None = None
    retrieval_split: str = "validation"
    gallery: int | None = None
    zero_shot_dataset: str | None = None
    zero_shot_split: str = "validation"


class Suite:
    """Evaluate a model on all devices of a mesh.

    Every process must call it, and every process gets the results.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        image_size: int,
        data_dir: str | Path,
        mesh: Mesh,
        implementation: str | None = None,
        train_batch_size: int | None = None,
    ):
        """Open the datasets.

        Args:
          config: settings of the evaluation.
          model: a `CLIP` module.
          tokenizer: tokenizer of captions and prompts.
          image_size: side of the square input images, in pixels.
          data_dir: directory of the prepared datasets.
          mesh: mesh with an axis "data".
          implementation: backend of `infcl_jax.pairwise_lse` for the split loss; None: the best for the platform.
          train_batch_size: pairs per batch of `validation/batch_loss`; None: skip this loss.

        Raises:
          FileNotFoundError: a dataset is not prepared.
          ValueError: a dataset or split is unknown, the retrieval dataset has no captions, or the zero-shot dataset has
            no classes.
        """
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._encode_image, self._encode_text = TowerEncoder(model, "encode_image"), TowerEncoder(model, "encode_text")
        self._image_size, self._mesh, self._implementation = image_size, mesh, implementation
        self._train_batch_size = train_batch_size
        self._retrieval_source = self._zero_shot_source = None
        if config.retrieval_dataset:
            self._retrieval_source = load_source(config.retrieval_dataset, config.retrieval_split, data_dir)
            if not is_captioned(self._retrieval_source):
                raise ValueError(
                    f"expected a retrieval_dataset with captions, got {config.retrieval_dataset!r}, which has only"
                    " classes; add captions, or evaluate it as zero_shot_dataset"
                )
        if config.zero_shot_dataset:
            self._zero_shot_source = load_source(config.zero_shot_dataset, config.zero_shot_split, data_dir)
            self._classes = classes(self._zero_shot_source)

    @property
    def chance_losses(self) -> dict[str, float]:
        """Chance levels ln(pairs) of the training and validation losses, by name, in nats."""
        size, split_size = self._train_batch_size, 0 if self._retrieval_source is None else len(self._retrieval_source)
        pairs = {"loss": size, "validation/batch_loss": size, "validation/loss": split_size}
        return {name: math.log(number) for name, number in pairs.items() if number}

    def __call__(self, variables: Any, grid_path: str | Path | None = None) -> dict[str, float]:
        """Evaluate a model.

        Args:
          variables: Flax variables of the model on the mesh, such as `TrainState.variables`.
          grid_path: output file for a plot of retrieval results; None: no plot.

        Returns:
          Metrics of the configured datasets. As fractions: `zero_shot/top1`, `zero_shot/top5`, and
          `retrieval/image_to_text_r<k>` and `retrieval/text_to_image_r<k>` for k = 1, 5, 10, with all captions of each
          image. In nats: `validation/loss` of the whole split as one batch, and `validation/batch_loss` of batches of
          `train_batch_size` pairs, if the split has that many. The losses pair each image with its first caption.
        """
        metrics: dict[str, float] = {}
        if self._retrieval_source is not None:
            features = self._encode(self._retrieval_source, variables, self._encode_text)
            scale, _ = self._model.apply(variables, method="logit_scale_and_bias")
            inputs = features.image, features.first_text, float(scale), self._mesh
            metrics["validation/loss"] = split_loss(*inputs, self._implementation)
            size = self._train_batch_size
            if size is not None and size <= len(features.image):
                metrics["validation/batch_loss"] = batch_loss(*inputs, size, self._implementation)
            image = features.image[: self._config.gallery]
            text_image = features.text_image[features.text_image < len(image)]
            recall = retrieval_recall(image, features.text[: len(text_image)], self._mesh, text_image=text_image)
            metrics |= {f"retrieval/{name}": value for name, value in recall.items()}
            if grid_path is not None and is_lead():
                self._draw_grid(image, features.first_text[: min(GRID_QUERIES, len(image))], grid_path)
        if self._zero_shot_source is not None:
            metrics |= {f"zero_shot/{name}": value for name, value in self._classify(variables).items()}
        return metrics

    def _classify(self, variables: Any) -> dict[str, float]:
        embeddings = class_embeddings(
            self._encode_text,
            variables,
            self._tokenizer,
            self._classes.names,
            self._classes.templates,
            self._mesh,
            batch_size=self._config.batch_size,
        )
        features = self._encode(self._zero_shot_source, variables, None)
        return zero_shot_accuracy(features.image, features.label, embeddings, self._mesh)

    def _encode(self, source: Source, variables: Any, encode_text: Encode | None) -> Features:
        batches = eval_batches(
            source,
            tokenizer=None if encode_text is None else self._tokenizer,
            image_size=self._image_size,
            batch_size=self._config.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        return encode_split(self._encode_image, encode_text, variables, batches, self._mesh)

    def _draw_grid(self, image: np.ndarray, text: np.ndarray, path: str | Path) -> None:
        captions = [self._retrieval_source[i]["captions"][0] for i in range(len(text))]
        images = _Images(self._retrieval_source, len(image))
        plot_retrieval_grid(captions, images, text @ image.T, path)


@dataclasses.dataclass(frozen=True)
class _Images(Sequence[np.ndarray]):
    """First `length` images of a source, read on access."""

    source: Source
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return decode_example(self.source, index)["image"]
