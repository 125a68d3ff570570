"""Encoder of images and texts: a model with its tokenizer."""

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from infcl_jax.data.decode.api import ImageLike, decode_image
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.transforms import RESIZE_MODES, SHORTEST_BICUBIC, Resize, resize_center_crop
from infcl_jax.inference.features import (
    Batch,
    TowerEncoder,
    check_sequence,
    encode_image_batches,
    encode_texts,
    padded_size,
)
from infcl_jax.inference.pretrained_tokenizer import save_tokenizer
from infcl_jax.inference.prompts import Prompts, class_embeddings
from infcl_jax.models import CLIP, CLIPConfig, config_of, save_pretrained
from infcl_jax.models.convert import ExportFormat
from infcl_jax.models.registry import prefix_model
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.runtime.mesh import to_host

DEFAULT_TEMPLATES = ("a photo of a {}.",)  # Radford et al. 2021, section 3.1.4


def image_resize(model: CLIPConfig) -> Resize:
    """Return the resize of a model's images in evaluations.

    Raises:
      ValueError: the resize is not supported.
    """
    check_choice("resize_mode", model.resize_mode, RESIZE_MODES)
    return Resize(model.resize_mode, model.interpolation)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """Dual encoder with its parameters, tokenizer and image transform.

    Inputs are encoded in batches on all devices of the mesh. With several processes, each must call the same methods
    with the same arguments, and each gets the results.

    Examples:
      >>> encoder = infcl_jax.load("runs/digits")
      >>> encoder.encode_images(["cat.jpg", "dog.jpg"]).shape
      (2, 16)
      >>> encoder.encode_texts(["a cat", "a dog"]).shape
      (2, 16)
      >>> probabilities = encoder.zero_shot(["cat.jpg"], ["cat", "dog"])  # [1, 2]

    Attributes:
      model: the `CLIP` module.
      variables: Flax variables of the model, on `mesh`.
      tokenizer: tokenizer of texts.
      mesh: devices, a mesh with an axis "data".
      batch_size: largest number of images or texts encoded at once, over all devices.
      resize: resize of images before the center crop.
      max_image_pixels: largest number of pixels of an encoded image.
      dim: size of the prefix to which features are cut, see `prefix`; None: the whole features.
    """

    model: CLIP
    variables: Any
    tokenizer: BaseTokenizer
    mesh: Mesh
    batch_size: int = 256
    resize: Resize = SHORTEST_BICUBIC
    max_image_pixels: int = MAX_PIXELS
    dim: int | None = None

    def prefix(self, dim: int) -> "Encoder":
        """Return an encoder of the first `dim` columns of the features, L2-normalized.

        Raises:
          ValueError: `dim` is not in [1, D].
        """
        whole = dataclasses.replace(self, dim=None)
        if not 1 <= dim <= whole.embed_dim:
            raise ValueError(f"expected dim between 1 and {whole.embed_dim}, the size of the features, got {dim}")
        return dataclasses.replace(self, dim=dim)

    def __repr__(self) -> str:
        """Describe the model in a line, without its arrays."""
        count, text = sum(leaf.size for leaf in jax.tree.leaves(self.variables["params"])), self.tokenizer
        return (
            f"Encoder({count:,} parameters, images of {self.image_size} pixels, texts of at most {text.context_length} "
            f"tokens of {text.vocab_size:,} ids, features of {self.embed_dim} dimensions, {self.mesh.size} device(s))"
        )

    @property
    def image_size(self) -> int:
        """Side of the square input images, in pixels; the model normalizes their channels."""
        return self.model.visual.image_size

    def encode_images(self, images: Sequence[ImageLike]) -> np.ndarray:
        """Encode images.

        They are decoded, resized and center-cropped as in evaluation, in threads.

        Args:
          images: n PIL images, paths or contents of image files, or uint8 arrays [H, W, 3], [H, W, 1] or [H, W].

        Returns:
          float32 [n, D], L2-normalized.

        Raises:
          ValueError: an image cannot be decoded, or `images` is not a sequence.
        """
        check_sequence("images", images)
        if len(images) == 0:
            return np.zeros((0, self.embed_dim), np.float32)
        encode = TowerEncoder(self.model, "encode_image", self.dim)
        batches = encode_image_batches(encode, self.variables, self._image_batches(images), self.mesh)
        return np.concatenate([batch["feature"][np.argsort(batch["index"])] for batch in batches])

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Encode texts.

        Args:
          texts: n texts.

        Returns:
          float32 [n, D], L2-normalized.

        Raises:
          ValueError: `texts` is not a sequence of strings.
        """
        check_sequence("texts", texts)
        if len(texts) == 0:
            return np.zeros((0, self.embed_dim), np.float32)
        encode = TowerEncoder(self.model, "encode_text", self.dim)
        return encode_texts(encode, self.variables, self.tokenizer, list(texts), self.mesh, self.batch_size)

    def classifier(self, classes: Sequence[str], templates: Prompts | None = None) -> np.ndarray:
        """Compute one zero-shot classifier vector per class.

        Args:
          classes: C class names.
          templates: prompt templates with "{}" for the class name, functions of the name, or the prompts of each class
            by name; None: "a photo of a {}.".

        Returns:
          float32 [C, D], unit vectors; see `infcl_jax.evaluation.class_embeddings`.

        Raises:
          ValueError: there is no class or no template, or a template lacks "{}".
        """
        return class_embeddings(
            TowerEncoder(self.model, "encode_text", self.dim),
            self.variables,
            self.tokenizer,
            classes,
            DEFAULT_TEMPLATES if templates is None else templates,
            self.mesh,
            batch_size=self.batch_size,
        )

    def zero_shot(
        self, images: Sequence[ImageLike], classes: Sequence[str], templates: Prompts | None = None
    ) -> np.ndarray:
        """Classify images by the similarity of their features to class prompts.

        The probabilities are a softmax over the classes, also for models trained with the sigmoid loss, whose logit
        bias cancels out.

        Args:
          images: n images, see `encode_images`.
          classes: C class names.
          templates: prompt templates, see `classifier`.

        Returns:
          float32 [n, C], probabilities.

        Raises:
          ValueError: see `encode_images` and `classifier`.
        """
        vectors = self.classifier(classes, templates)
        logits = self.logit_scale * self.encode_images(images).astype(np.float64) @ vectors.T.astype(np.float64)
        return np.asarray(jax.nn.softmax(logits.astype(np.float32), axis=1))

    def save(self, path: str | os.PathLike[str], format: ExportFormat = "open_clip") -> str:
        """Write the model and its tokenizer, for `load` and for other libraries.

        The projections of an encoder of a prefix are cut to its size.

        Args:
          path: folder, created if missing. The tokenizer is written to its subfolder `tokenizer`; one of Hugging Face
            also to the folder itself with the format "open_clip", where OpenCLIP reads it.
          format: "open_clip" or "hf", see `infcl_jax.models.save_pretrained`.

        Returns:
          One line on the files, converted back, see `infcl_jax.models.save_pretrained`.

        Raises:
          ValueError: the format has no such model, or the projections of an encoder of a prefix are not linear.

        Examples:
          >>> infcl_jax.load("runs/digits").save("exported_run")
          'exported_run (open_clip): ... tensors match ... parameters; converted back they are equal'
        """
        resize: dict[str, Any] = {"resize_mode": self.resize.mode, "interpolation": self.resize.interpolation}
        config = dataclasses.replace(config_of(self.model), **resize)
        variables = jax.tree.map(to_host, self.variables)
        if self.dim is not None:
            config, variables = prefix_model(config, variables, self.dim)
        checked = save_pretrained(Path(path), config, variables, format)
        save_tokenizer(Path(path), self.tokenizer)
        return checked

    def fingerprint(self) -> str:
        """Hash the model, its parameters and its image transform to 64 hexadecimal digits."""
        facts = self.model, self.image_size, self.resize, *(() if self.dim is None else (self.dim,))
        digest = hashlib.sha256(repr(facts).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.variables):
            array = np.ascontiguousarray(to_host(leaf))
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def embed_dim(self) -> int:
        """Size D of the features."""
        tokens = jax.ShapeDtypeStruct((1, self.tokenizer.context_length), jnp.int32)
        return jax.eval_shape(TowerEncoder(self.model, "encode_text", self.dim), self.variables, tokens).shape[1]

    @property
    def logit_scale(self) -> float:
        """Factor of the similarities, at most 100."""
        scale, _ = self.model.apply(self.variables, method="logit_scale_and_bias")
        return float(scale)

    def _image_batches(self, images: Sequence[ImageLike]) -> Iterator[Batch]:
        """Decode this process's rows of each batch in threads."""
        rows = padded_size(len(images), self.batch_size, self.mesh.size)
        local = rows // jax.process_count()
        with concurrent.futures.ThreadPoolExecutor(usable_cores()) as threads:
            for start in range(0, len(images), rows):
                first = start + jax.process_index() * local
                index = range(first, max(first, min(first + local, len(images))))
                batch = {
                    "image": np.zeros((local, self.image_size, self.image_size, 3), np.uint8),
                    "label": np.full(local, -1, np.int32),
                    "index": np.full(local, -1, np.int64),
                    "mask": np.arange(local) < len(index),
                }
                batch["index"][: len(index)] = index
                for row, image in enumerate(threads.map(lambda i: self._transformed(images[i], i), index)):
                    batch["image"][row] = image
                yield batch

    def _transformed(self, image: ImageLike, number: int) -> np.ndarray:
        """Decode an image, resize it and crop its center."""
        try:
            return resize_center_crop(decode_image(image, self.max_image_pixels), self.image_size, self.resize)
        except Exception as error:  # image decoders raise any exception
            name = f" ({image})" if isinstance(image, str | os.PathLike) else ""
            raise ValueError(f"image {number}{name} cannot be decoded: {type(error).__name__}: {error}") from error
