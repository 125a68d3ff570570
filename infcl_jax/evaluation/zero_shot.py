"""Zero-shot classification with an ensemble of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.evaluation.class_data import checked_template
from infcl_jax.evaluation.features import Encode, encode_texts, l2_normalize
from infcl_jax.evaluation.metrics import accuracies
from infcl_jax.evaluation.retrieval import count_rivals, paired_similarity

Template = str | Callable[[str], str]


class Tokenizer(Protocol):
    """Interface of a tokenizer, such as `infcl_jax.data.ByteTokenizer`."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Encode n texts as int32 [n, context_length]."""


def class_embeddings(
    encode_text: Encode,
    params: Any,
    tokenizer: Tokenizer,
    class_names: Sequence[str],
    templates: Sequence[Template],
    mesh: Mesh,
    *,
    batch_size: int = 512,
) -> np.ndarray:
    """Compute one zero-shot classifier vector per class.

    A vector is the normalized mean of the normalized features of the prompts of its class. This is the prompt ensemble
    in embedding space of CLIP (Radford et al. 2021, arXiv:2103.00020, section 3.1.4).

    Examples:
      >>> def encode_text(variables, tokens):
      ...     return model.apply(variables, tokens, method="encode_text")
      >>> templates = ("a photo of a {}.", "a drawing of a {}.")
      >>> tokenizer, names = ByteTokenizer(36), ("cat", "dog")
      >>> class_embeddings(encode_text, variables, tokenizer, names, templates, mesh, batch_size=8).shape
      (2, 16)

    Args:
        encode_text: `encode_text(params, ids [b, L]) -> [b, D]`, any float dtype. Pass the same function object each
            time, because the encoder is compiled once per object.
        params: parameters of `encode_text`, on `mesh`.
        tokenizer: tokenizer of n texts as int32 [n, L].
        class_names: C class names.
        templates: T prompt templates. A template is a string with "{}" for the class name and no other braces, or
            a function of the name.
        mesh: mesh with an axis "data"; prompts are encoded on all its devices.
        batch_size: prompts encoded at once, over all devices; rounded up to a multiple of the mesh size.

    Returns:
        float32 [C, D], unit vectors, the same on every process.

    Raises:
        ValueError: there is no class or no template, a template lacks "{}" or has other braces, or `batch_size` < 1.
    """
    if not class_names or not templates:
        raise ValueError(f"expected classes and templates, got {len(class_names)} and {len(templates)}")
    if isinstance(class_names, str) or isinstance(templates, str):
        raise ValueError("expected lists of class names and templates, got a single string; put it in a list")
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
    texts = [template if callable(template) else checked_template(template, "template") for template in templates]
    prompts = [_fill(template, name) for name in class_names for template in texts]
    features = encode_texts(encode_text, params, tokenizer, prompts, mesh, batch_size)
    unit = l2_normalize(features).reshape(len(class_names), len(templates), -1)
    return l2_normalize(unit.mean(axis=1))


def zero_shot_accuracy(
    image_features: np.ndarray,
    labels: np.ndarray,
    class_embeddings: np.ndarray,
    mesh: Mesh,
    topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
    """Compute the top-k accuracy of zero-shot classification.

    Classes are ranked by the cosine similarity of their embeddings to the image (CLIP, arXiv:2103.00020, section 3.1).
    Ties count as misses, as in `retrieval_recall`, so collapsed or non-finite features score 0. A k that is at least
    the number of classes always gives 1.

    Examples:
      >>> features, classifier = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)
      >>> zero_shot_accuracy(features, np.array([0, 1, 2, 0]), classifier, mesh, topk=(1,))
      {'top1': 0.75}

    Args:
        image_features: [N, D], any float dtype, the same on every process; need not be normalized.
        labels: int [N], classes in [0, C), or -1 for samples without a class, which are ignored.
        class_embeddings: [C, D], classifier vectors from `class_embeddings`.
        mesh: mesh with an axis "data".
        topk: cutoffs k, each >= 1.

    Returns:
        `{"top1": ..., "top5": ...}`, fractions in [0, 1] of the labeled samples.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, no sample is labeled, or a k is < 1.
    """
    if not topk or min(topk) < 1:
        raise ValueError(f"expected cutoffs topk >= 1, got {tuple(topk)}")
    return accuracies(class_ranks(image_features, labels, class_embeddings, mesh), topk)


def class_ranks(image_features: np.ndarray, labels: np.ndarray, class_embeddings: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Rank the class of each labeled image by cosine similarity.

    Args:
        image_features: [N, D], see `zero_shot_accuracy`.
        labels: int [N], classes in [0, C), or -1 for samples without a class, which are left out.
        class_embeddings: [C, D], classifier vectors from `class_embeddings`.
        mesh: mesh with an axis "data".

    Returns:
        int32 [labeled images], zero-based ranks: the number of other classes that are at least as similar to the image.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, or no sample is labeled.
    """
    labels = np.asarray(labels)
    _check(image_features, labels, class_embeddings)
    labeled = labels >= 0
    label = labels[labeled].astype(np.int32)
    image, classes = l2_normalize(image_features[labeled]), l2_normalize(class_embeddings)
    positive = paired_similarity(image, classes[label])
    return count_rivals(image, label, positive, classes, np.arange(len(classes), dtype=np.int32), mesh)


def _fill(template: Template, name: str) -> str:
    """Fill a template with a class name."""
    return template(name) if callable(template) else template.replace("{}", name)


def _check(image: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> None:
    """Validate the arguments of `class_ranks`."""
    if image.ndim != 2 or classes.ndim != 2 or image.shape[1] != classes.shape[1] or 0 in classes.shape:
        raise ValueError(f"expected features [N, D] and class embeddings [C, D], got {image.shape} and {classes.shape}")
    if labels.shape != (len(image),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected integer labels of shape ({len(image)},), got {labels.dtype} {labels.shape}")
    if not np.any(labels >= 0):
        raise ValueError(f"expected labeled samples, got none among {len(labels)}; use a split that has classes")
    if labels.min() < -1 or labels.max() >= len(classes):
        raise ValueError(
            f"expected labels in [-1, {len(classes)}), got values in [{labels.min()}, {labels.max()}]; "
            "pass the class names of this source"
        )
