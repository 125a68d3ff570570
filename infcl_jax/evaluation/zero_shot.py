"""Zero-shot classification with an ensemble of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.distributed import to_host
from infcl_jax.evaluation.features import Encode, encode_sharded, l2_normalize, pad_rows, shard_rows
from infcl_jax.evaluation.retrieval import count_rivals, paired_similarity

Template = str | Callable[[str], str]


class Tokenizer(Protocol):
    """Anything that turns n texts into int32 [n, context_length]."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Token ids of the texts, int32 [n, context_length]."""


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
    """One classifier vector a class: the normalised mean of the normalised features of its prompts.

    This is the prompt ensemble in embedding space of CLIP (Radford et al. 2021, arXiv:2103.00020, section 3.1.4).

    Args:
        encode_text: `encode_text(params, ids [b, L]) -> [b, D]`, any float dtype; pass the same function object each
            time, the compiled encoder is kept per object.
        params: what `encode_text` takes, living on `mesh`.
        tokenizer: texts -> int32 [n, L].
        class_names: C names.
        templates: T templates, each a string in which every "{}" stands for the name, or a function of the name.
        mesh: mesh with an axis "data"; prompts are encoded on all its devices.
        batch_size: prompts encoded at once over the whole mesh, rounded up to the mesh size.

    Returns:
        float32 [C, D], unit vectors, the same on every process.

    Raises:
        ValueError: no class, no template, a template without "{}", or a batch size < 1.
    """
    if not class_names or not templates:
        raise ValueError(f"expected classes and templates, got {len(class_names)} and {len(templates)}")
    if isinstance(class_names, str) or isinstance(templates, str):
        raise ValueError("expected lists of class names and templates, got a single string; put it in a list")
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
    prompts = [_fill(template, name) for name in class_names for template in templates]
    size = -(-min(batch_size, len(prompts)) // mesh.size) * mesh.size
    parts = []
    for start in range(0, len(prompts), size):
        ids = tokenizer(prompts[start : start + size])
        features = encode_sharded(encode_text, mesh, params, shard_rows(mesh, pad_rows(ids, size)))
        parts.append(to_host(features)[: len(ids)])
    unit = l2_normalize(np.concatenate(parts)).reshape(len(class_names), len(templates), -1)
    return l2_normalize(unit.mean(axis=1))


def zero_shot_accuracy(
    image_features: np.ndarray,
    labels: np.ndarray,
    class_embeddings: np.ndarray,
    mesh: Mesh,
    topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
    """Top-k accuracy of classification by the most similar class embedding (CLIP, arXiv:2103.00020, section 3.1).

    Ties count against the right class, as in `retrieval_recall`: collapsed or non-finite features score 0. A k that is
    not smaller than the number of classes gives 1 whatever the features are.

    Args:
        image_features: [N, D], any float dtype, the same on every process; they need not be normalised.
        labels: int [N], in [0, C), or -1 for a sample without a class, which is left out.
        class_embeddings: [C, D], see the function of that name.
        mesh: mesh with an axis "data".
        topk: cut-offs, each >= 1.

    Returns:
        `{"top1": ..., "top5": ...}`, fractions in [0, 1] of the labelled samples.

    Raises:
        ValueError: shapes that do not fit, a label >= C or < -1, no labelled sample, or a k < 1.
    """
    labels = np.asarray(labels)
    _check(image_features, labels, class_embeddings, topk)
    labelled = labels >= 0
    label = labels[labelled].astype(np.int32)
    image, classes = l2_normalize(image_features[labelled]), l2_normalize(class_embeddings)
    right = paired_similarity(image, classes[label])
    rank = count_rivals(image, label, right, classes, np.arange(len(classes), dtype=np.int32), mesh)
    return {f"top{k}": float(np.mean(rank < k)) for k in topk}


def _fill(template: Template, name: str) -> str:
    """The prompt of one class."""
    if callable(template):
        return template(name)
    if "{}" not in template:
        raise ValueError(f'expected a template with "{{}}" where the class name goes, got {template!r}')
    return template.replace("{}", name)


def _check(image: np.ndarray, labels: np.ndarray, classes: np.ndarray, topk: Sequence[int]) -> None:
    """Validates the arguments of `zero_shot_accuracy`."""
    if image.ndim != 2 or classes.ndim != 2 or image.shape[1] != classes.shape[1] or 0 in classes.shape:
        raise ValueError(f"expected features [N, D] and class embeddings [C, D], got {image.shape} and {classes.shape}")
    if labels.shape != (len(image),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected integer labels of shape ({len(image)},), got {labels.dtype} {labels.shape}")
    if not topk or min(topk) < 1:
        raise ValueError(f"expected cut-offs topk >= 1, got {tuple(topk)}")
    if not np.any(labels >= 0):
        raise ValueError(f"expected labelled samples, got none among {len(labels)}; use a split that has classes")
    if labels.min() < -1 or labels.max() >= len(classes):
        raise ValueError(
            f"expected labels in [-1, {len(classes)}), got values in [{labels.min()}, {labels.max()}]; "
            "pass the class names of this source"
        )
