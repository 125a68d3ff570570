"""Zero-shot classification with an ensemble of prompts."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data.sources.labels import checked_prompts, class_templates
from infcl_jax.evaluation.class_data import checked_template
from infcl_jax.evaluation.features import Encode, encode_texts, l2_normalize
from infcl_jax.evaluation.metrics import accuracies
from infcl_jax.evaluation.retrieval import count_rivals, paired_similarity, warn_once
from infcl_jax.runtime.processes import is_lead

Template = str | Callable[[str], str]
Prompts = str | Sequence[Template] | Mapping[str, str | Sequence[str]]  # templates, or prompts by class name


class Tokenizer(Protocol):
    """Interface of a tokenizer, such as `infcl_jax.data.ByteTokenizer`."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Encode n texts as int32 [n, context_length]."""


def class_embeddings(
    encode_text: Encode,
    params: Any,
    tokenizer: Tokenizer,
    class_names: Sequence[str],
    templates: Prompts,
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
        templates: prompt templates, or the prompts of each class by name, as those of CuPL (Pratt et al. 2023,
            arXiv:2209.03320). A template is a string with "{}" for the class name and no other braces, or a function of
            the name.
        mesh: mesh with an axis "data"; prompts are encoded on all its devices.
        batch_size: prompts encoded at once, over all devices; rounded up to a multiple of the mesh size.

    Returns:
        float32 [C, D], unit vectors, the same on every process.

    Raises:
        ValueError: there is no class or no template, a template lacks "{}" or has other braces, a class has no prompts,
            or `batch_size` < 1.
    """
    if not class_names or not templates:
        raise ValueError(f"expected classes and templates, got {len(class_names)} and {len(templates)}")
    if isinstance(class_names, str):
        raise ValueError("expected a list of class names, got a single string; put it in a list")
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
    warn_of_equal_names(class_names)
    if isinstance(templates, Mapping):
        prompts = class_templates(checked_prompts(templates, "templates"), class_names, "templates")
    else:
        templates = (templates,) if isinstance(templates, str) else templates
        texts = [template if callable(template) else checked_template(template, "template") for template in templates]
        prompts = tuple(tuple(_fill(template, name) for template in texts) for name in class_names)
    return prompt_ensembles(encode_text, params, tokenizer, prompts, mesh, batch_size)


def prompt_ensembles(
    encode_text: Encode,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[str]],
    mesh: Mesh,
    batch_size: int,
) -> np.ndarray:
    """Compute the classifier vector of each class from its own prompts, see `class_embeddings`.

    Args:
        encode_text: encoder of token ids.
        params: parameters of `encode_text`, on `mesh`.
        tokenizer: tokenizer of n texts as int32 [n, L].
        prompts: prompts of C classes, at least one each.
        mesh: mesh with an axis "data".
        batch_size: prompts encoded at once.

    Returns:
        float32 [C, D], unit vectors, the same on every process.
    """
    texts, counts = list(itertools.chain(*prompts)), np.array([len(own) for own in prompts])
    unit = l2_normalize(encode_texts(encode_text, params, tokenizer, texts, mesh, batch_size))
    sums = np.add.reduceat(unit, np.cumsum(counts) - counts, axis=0)
    return l2_normalize(sums / counts[:, None].astype(np.float32))


def warn_of_equal_names(class_names: Sequence[str]) -> None:
    """Warn of classes with equal names on the lead process, once for each list of names."""
    counts = collections.Counter(class_names if is_lead() else ())
    if repeated := [f"{name!r} ({count})" for name, count in counts.items() if count > 1]:
        shown = ", ".join(repeated[:5]) + (f" and {len(repeated) - 5} more" if len(repeated) > 5 else "")
        warn_once(
            f"equal names of {sum(n for n in counts.values() if n > 1)} of {len(class_names)} classes: {shown}; the"
            " first of equal classes is predicted, so images of the others are never right in top1"
        )


def zero_shot_accuracy(
    image_features: np.ndarray,
    labels: np.ndarray,
    class_embeddings: np.ndarray,
    mesh: Mesh,
    topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
    """Compute the top-k accuracy of zero-shot classification.

    Classes are ranked by the cosine similarity of their embeddings to the image (CLIP, arXiv:2103.00020, section 3.1).
    The first of tied classes wins, as in `argmax`: similarities within `TIE_TOLERANCE` are tied. Collapsed features
    therefore score the share of the first class, and non-finite features 0. A k that is at least the number of classes
    always gives 1.

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
        int32 [labeled images], zero-based ranks: the number of other classes that are more similar to the image, or
        as similar with a lower label.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, or no sample is labeled.
    """
    labels = np.asarray(labels)
    _check(image_features, labels, class_embeddings)
    labeled = labels >= 0
    label = labels[labeled].astype(np.int32)
    image, classes = l2_normalize(image_features[labeled]), l2_normalize(class_embeddings)
    positive = paired_similarity(image, classes[label])
    rows = np.arange(len(classes), dtype=np.int32)
    return count_rivals(image, label, positive, classes, rows, mesh, first_wins=True)


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
