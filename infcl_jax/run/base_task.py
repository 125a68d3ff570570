"""What all kinds of training data share: model, tokenizer, batches and encoder of a run."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from infcl_jax.data import TrainIterator, check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER, check_padding_side
from infcl_jax.models import BertConfig, CLIPConfig, TextConfig, TextPairConfig
from infcl_jax.run.model import overridden_model, restored_model
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.settings import RunConfig

_SPECS = {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}  # by the size of a vocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class BaseTask[C: (CLIPConfig, TextPairConfig), E](abc.ABC):
    """Training of models with configurations `C`, whose encoders are `E`.

    Subclasses also have `source`, `training_data` and `batch_shapes` of the training data, `suite` of the evaluations,
    `initialize`, which loads pretrained weights, and `export`. `passages` counts the rows of the second tower for each
    row of the first. `prefixes` are the sizes of the feature prefixes to train and evaluate, `precomputed` the frozen
    towers with cached features, and `init_logit_scale` is the initial logarithm of the inverse temperature.

    Attributes:
      config: settings of the run.
      unit: name of the rows of a batch.
    """

    config: RunConfig

    unit: ClassVar[str]

    @property
    @abc.abstractmethod
    def base_model(self) -> C:
        """Model configuration without overrides."""

    @functools.cached_property
    def model_config(self) -> C:
        """Model configuration with overrides, see `infcl_jax.run.read_model_config`."""
        return overridden_model(self.config, self.base_model)

    @abc.abstractmethod
    def tokenizer_of_weights(self) -> BaseTokenizer | None:
        """Load the tokenizer of the initial weights; None without weights."""

    def tokenizer(self, workdir: str | Path | None = None) -> BaseTokenizer:
        """Load the tokenizer and check that it fits the model, see `infcl_jax.run.text_tokenizer`.

        It is the run's copy, else the setting `tokenizer`, that of the initial weights or that of the vocabulary.
        """
        config, text, tokenizer = self.config, self.model_config.text, None
        spec, size = config.tokenizer, self.base_model.text.vocab_size
        if workdir is not None and (copied := Path(workdir) / TOKENIZER_FOLDER).is_dir():
            spec = str(copied)
        elif spec is None:
            spec = _SPECS.get(size)
            if spec is None or config.model is None:
                tokenizer = self.tokenizer_of_weights()
        if tokenizer is None and spec is None:
            raise ValueError(
                f"expected a tokenizer for the {size} token ids of the model {config.model!r}, got None; set tokenizer"
            )
        tokenizer = tokenizer or load_tokenizer(spec, text.context_length, clean=config.text_cleaning)
        end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
        check_vocabulary(tokenizer, text.vocab_size, end_token)
        check_padding_side(tokenizer, text)
        if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
            raise ValueError(
                f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
                "set it in model_overrides, or choose another tokenizer"
            )
        return tokenizer

    def reading(self) -> dict[str, Any]:
        """Return the arguments that the iterators over training batches share."""
        names = "batch_size", "seed", "num_workers", "num_threads", "prefetch_batches", "max_bad_records"
        processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        return {name: self.config[name] for name in names} | processes

    @abc.abstractmethod
    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a batch that the step takes."""

    def next_batch(self, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        inputs = self.inputs(next(data))
        if self.config.grad_cache.residency == "host":
            return inputs
        return jax.tree.map(lambda array: array if isinstance(array, jax.Array) else shard_batch(mesh, array), inputs)

    def load(
        self,
        workdir: Path,
        step: int | None,
        tokenizer: str | BaseTokenizer | None,
        dtype: str | None,
        mesh: Mesh,
        batch_size: int,
    ) -> E:
        """Load the encoder of a checkpoint, see `infcl_jax.load`."""
        _, config, variables = restored_model(self.model_config, workdir, mesh, step, dtype)
        if tokenizer is None:
            tokenizer = self.tokenizer(workdir)
        elif not isinstance(tokenizer, BaseTokenizer):
            tokenizer = load_tokenizer(tokenizer, config.text.context_length)
        return self.encoder(config, variables, tokenizer, mesh, batch_size)

    @abc.abstractmethod
    def encoder(self, config: C, variables: Any, tokenizer: BaseTokenizer, mesh: Mesh, batch_size: int) -> E:
        """Return the encoder of a restored model."""
