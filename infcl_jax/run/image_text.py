"""Training on images with their texts."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.data import (
    BadRecordError,
    FeatureStore,
    Source,
    TrainIterator,
    check_deterministic,
    load_source,
    load_tokenizer,
    train_iterator,
)
from infcl_jax.data.decode import choose_decoder
from infcl_jax.data.decode.nvimgcodec import NvImageCodecDecoder, open_decoders
from infcl_jax.data.feature_store import TeacherTokens
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.pipeline import text_reader
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import Suite
from infcl_jax.inference.encoder import Encoder, image_resize
from infcl_jax.inference.pretrained_tokenizer import (
    TOKENIZER_FOLDER,
    copy_tokenizer,
    pretrained_tokenizer,
    suitable_tokenizer,
)
from infcl_jax.losses.base import IMAGE_TEXT_TEACHER
from infcl_jax.losses.matryoshka import checked_dims
from infcl_jax.models import CLIPConfig, build_model, save_pretrained
from infcl_jax.models.convert import export_stablehlo, open_source
from infcl_jax.models.registry import prefix_model
from infcl_jax.ops.color import with_colors
from infcl_jax.run.base import Run
from infcl_jax.run.initialize import initialize
from infcl_jax.run.model import base_model, restored_model, run_of, saved_config
from infcl_jax.run.text_packing import TextReader, silent
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import data_mesh, flat_mesh
from infcl_jax.runtime.processes import local_processes
from infcl_jax.training import TrainState, loss_class, replayed
from infcl_jax.training.frozen import PrecomputedFeatures

_PREFETCHED = 1  # decoded batches that wait in the memory of the devices

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageTextRun(Run[CLIPConfig, Encoder]):
    """Contrastive training of a `CLIP` model."""

    unit: ClassVar[str] = "images"

    @functools.cached_property
    def base_model(self) -> CLIPConfig:
        """Model configuration without overrides, see `infcl_jax.run.model.base_model`."""
        return base_model(self.config)

    @property
    def init_logit_scale(self) -> float:
        """Initial parameter of the model, the logarithm of the inverse temperature."""
        return self.model_config.init_logit_scale

    @functools.cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Sizes of the feature prefixes to train and evaluate."""
        dims, size = checked_dims("matryoshka", self.config.matryoshka), self.model_config.embed_dim
        if dims and dims[-1] > size:
            raise ValueError(f"expected matryoshka with sizes of at most {size}, the features of the model, got {dims}")
        return dims

    @functools.cached_property
    def precomputed(self) -> tuple[str, ...]:
        """Frozen towers whose features are cached."""
        config = self.config
        if config.cache_frozen is None:
            return ()
        towers = tuple(name for name in config.frozen if not config.unlocked_groups[name])
        if not towers:
            raise ValueError(
                "expected a frozen tower without unlocked groups with cache_frozen="
                f"{config.cache_frozen!r}, got frozen={config.frozen}; freeze one, or set cache_frozen to None"
            )
        if "image" in towers:
            check_deterministic(config.augmentation)
        return towers

    def tokenizer_of_weights(self) -> BaseTokenizer | None:
        """Load the tokenizer of `init.model`."""
        if self.config.init.model is None:
            return None
        workdir, _ = run_of(self.config.init.model)
        if workdir is None:
            source = open_source(self.config.init.model)
            return pretrained_tokenizer(source, self.model_config, self.config.text_cleaning)
        if (copied := workdir / TOKENIZER_FOLDER).is_dir():
            length = self.model_config.text.context_length
            return load_tokenizer(str(copied), length, clean=self.config.text_cleaning)
        return ImageTextRun(saved_config(workdir)).tokenizer

    def open_data(self) -> Source:
        """Open the training data, see `infcl_jax.data.load_source`."""
        return load_source(self.config.dataset, self.config.split, self.config.data_dir)

    def open_iterator(self, features: Mapping[str, FeatureStore] | None = None, teacher: Any = None) -> TrainIterator:
        """Create the iterator over training batches, see `infcl_jax.run.training_data`."""
        config, local = self.config, local_processes()
        decoders = None if features and "image" in features else self._device_decoders()
        options = self.iterator_options() | ({} if decoders is None else {"prefetch_batches": _PREFETCHED})
        return train_iterator(
            self.source,
            tokenizer=self.tokenizer,
            image_size=self.model_config.vision.image_size,
            max_image_pixels=config.max_image_pixels,
            cores=max(1, usable_cores() // local.cores),
            processes_per_host=local.host,
            augmentation=config.augmentation,
            decoders=decoders,
            sharding=NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names)),
            features=features,
            positives=config.positives,
            teacher=teacher,
            **options,
        )

    def text_reader(self) -> TextReader:
        """Return the reader of the token ids of `text_towers`."""
        teacher = None
        if self.teacher is not None and (own := self.teacher.own_tokens(self.texts)) is not None:
            teacher = TeacherTokens(silent(cast(BaseTokenizer, own)))
        return text_reader(self.source, silent(self.tokenizer), self.config.seed, teacher)

    def _device_decoders(self) -> dict[jax.Device, NvImageCodecDecoder] | None:
        """Create the decoder of each device of this process; None if the host decodes."""
        config = self.config
        if choose_decoder(config.decode, config.grad_cache.offload) == "pillow":
            return None
        with contextlib.suppress(BadRecordError):  # a bad record does not say how the others are encoded
            if not isinstance(self.source[0]["image"], bytes):
                return None
        size = self.model_config.vision.image_size
        try:
            return open_decoders(self.mesh.local_devices, config.batch_size // self.mesh.size, size)
        except ValueError as error:
            if config.decode == "nvimgcodec":
                raise
            _logger.warning("the host decodes images: %s", error)
            return None

    def next_batch(self, data: TrainIterator) -> dict[str, Any]:
        """Return the batch of the next step, with offload "replay" to be read by the step itself."""
        cache = self.config.grad_cache
        if cache.offload == "replay":
            return replayed(data.next_reader(), cache.chunk_size, self.mesh, self.precomputed, data.packer)
        return super().next_batch(data)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return images and texts, or their cached features, and what the loss and its teacher need."""
        inputs = {"image": with_colors(batch), "text": batch["text"]}
        inputs |= {name: PrecomputedFeatures(batch[name]) for name in self.precomputed}
        if "index" in loss_class(self.config.loss).inputs:
            inputs["index"] = batch["index"].astype(np.int32)
        if self.config.positives != "pair":
            inputs["ids"] = batch["ids"]
        return inputs | {name: batch[name] for name in IMAGE_TEXT_TEACHER if name in batch}

    def batch_shapes(self) -> dict[str, Any] | None:
        """Return the shape, dtype and sharding of each array of a batch, to compile the step before the first one.

        None if the batch is not in device memory, or if it has more than images, texts, sample indices and ids.
        """
        config = self.config
        if config.grad_cache.offload != "none" or self.precomputed or config.teacher is not None:
            return None
        side, rows = self.model_config.vision.image_size, config.batch_size
        shapes: dict[str, tuple[Any, ...]] = {
            "image": (np.uint8, side, side, 3),
            "text": (np.int32, self.tokenizer.context_length),
        }
        shapes |= {"index": (np.int32,), "ids": (np.int32, 2)}
        if config.augmentation.adjusts_colors:
            shapes["color"] = (np.float32, 7)
        batch: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (dtype, *shape) in shapes.items()
        }
        batch |= {name: entry.packing.shapes(batch[name]) for name, entry in self.text_packing.packed.items()}
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return jax.tree.map(lambda a: a.update(sharding=sharding), jax.eval_shape(self.inputs, batch))

    @functools.cached_property
    def suite(self) -> Suite:
        """Evaluations of the run, see `infcl_jax.run.evaluation_suite`."""
        config = self.config
        return Suite(
            config.evaluation,
            self.model,
            self.tokenizer,
            image_size=self.model_config.vision.image_size,
            data_dir=config.data_dir,
            mesh=flat_mesh(self.mesh),
            implementation=config.implementation,
            train_batch_size=config.batch_size if config.loss == "clip" else None,
            evaluations=config.evaluations,
            prefixes=self.prefixes,
            resize=image_resize(self.model_config),
            say=self.say,
            check=self.check,
            max_bad_records=config.max_bad_records,
            max_image_pixels=config.max_image_pixels,
        )

    def _with_pretrained(self, state: TrainState) -> TrainState:
        """Replace the parameters that the settings `init` name, see `infcl_jax.run.initialize`."""
        init = self.config.init
        return initialize(init, self.model_config, state) if init.model or init.image or init.text else state

    def encoder(
        self, config: CLIPConfig, variables: Any, tokenizer: BaseTokenizer, mesh: Mesh, batch_size: int
    ) -> Encoder:
        """Return the encoder of a restored model, whose tokenizer may be another one than the run's."""
        text, resize = suitable_tokenizer(tokenizer, config), image_resize(config)
        return Encoder(build_model(config), variables, text, mesh, batch_size, resize, self.config.max_image_pixels)

    def export(self, output: Path, format: str | None, dim: int | None) -> str:
        """Write the latest checkpoint for other programs, see `infcl_jax.export`."""
        mesh = data_mesh(jax.local_devices(backend="cpu")[:1])
        step, config, variables = restored_model(self.model_config, self.origin, mesh)
        if dim is not None:
            config, variables = prefix_model(config, variables, dim)
        if format == "stablehlo":
            checked = export_stablehlo(output, config, variables)
        else:
            checked = save_pretrained(output, config, variables, format or "open_clip")  # type: ignore[arg-type]
        copy_tokenizer(self.origin, output)
        say(f"exported step {step} of {self.origin}: {checked}")
        return checked
