"""Classifiers of class names, from ensembles of prompts."""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data.sources.labels import checked_prompts, class_templates
from infcl_jax.inference.features import Encode, encode_texts, l2_normalize
from infcl_jax.runtime.console import warn_once
from infcl_jax.runtime.processes import is_lead

Template = str | Callable[[str], str]
Prompts = str | Sequence[Template] | Mapping[str, str | Sequence[str]]  # templates, or prompts by class name


def class_embeddings(
    encode_text: Encode,
    params: Any,
    tokenizer: Callable[[Sequence[str]], np.ndarray],
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
        templates: prompt templates, or the prompts of each class by name, as CuPL's (Pratt et al. 2023,
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
    tokenizer: Callable[[Sequence[str]], np.ndarray],
    prompts: Sequence[Sequence[str]],
    mesh: Mesh,
    batch_size: int,
) -> np.ndarray:
    """Compute the classifier vector of each class from its own prompts, at least one, see `class_embeddings`."""
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


def checked_template(template: str, where: str) -> str:
    """Return a prompt template with "{}" for the class name, in place of "{c}".

    Raises:
      ValueError: the template has neither or other braces; the message has its origin `where`.
    """
    checked = template.replace("{c}", "{}") if isinstance(template, str) else ""
    if "{}" not in checked or any(brace in checked.replace("{}", "") for brace in "{}"):
        raise ValueError(
            f'{where}: expected "{{c}}" or "{{}}" for the class name and no other braces, got {template!r}'
        )
    return checked


def _fill(template: Template, name: str) -> str:
    """Fill a template with a class name."""
    return template(name) if callable(template) else template.replace("{}", name)
