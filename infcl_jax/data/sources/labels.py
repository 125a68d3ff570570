"""Class labels of the user's files: class names, label values and prompt templates."""

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infcl_jax.data.sources import files, splits
from infcl_jax.data.sources.base import Classes

CLASS_FILES = ("classes.txt", "classes.json")
TEMPLATE_FILE, PROMPTS_FILE = "templates.txt", "templates.json"
PHOTO_TEMPLATES = (
    "a photo of a {}",
    "a picture of a {}",
    "an image of one {}",
    "a close view of the {}",
    "a {} in a photo",
    "the {}",
)
UNLABELED = -1

Templates = tuple[str, ...] | Mapping[str, tuple[str, ...]]  # for all classes, or prompts by class name

_MAX_CLASSES = 2**17  # ImageNet-21k has 21,841; more are free text in a column of that name
_INTEGER = re.compile(r"[+-]?\d+")
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ClassNames:
    """Class names of a file, or of the data itself."""

    path: str
    names: tuple[str, ...]  # in label order
    labels: Mapping[str, int]  # of each name and value; of equal names, the first

    def label(self, value: str) -> int:
        """Return the label of a value: a class, or the label itself.

        Underscores of a class may be spaces in its name.
        """
        for text in (value, _spaced(value)):
            if text in self.labels:
                return self.labels[text]
        if _INTEGER.fullmatch(value) and UNLABELED <= int(value) < len(self.names):
            return int(value)
        raise ValueError(
            f"expected a label in [0, {len(self.names)}) or a class of {self.path}, got {value!r}; correct one of them"
        )


def read_class_names(folder: str) -> ClassNames | None:
    """Read the class names next to the data.

    `classes.txt` has one name per line, in label order. `classes.json` is a list of names in label order, an object of
    names by value ({"n02123045": "tabby cat"}) in label order, or an object of labels by name ({"tabby cat": 0}). They
    are in the folder of the data, or above it if the folder is a split. Returns None without such a file.
    """
    path = _find(folder, CLASS_FILES)
    if path is None:
        return None
    pairs = json_class_names(path) if path.endswith(".json") else [(name, name) for name in _lines(path)]
    values, names = zip(*pairs, strict=True)
    labels = {text: label for texts in (names, values) for label, text in reversed(list(enumerate(texts)))}
    return ClassNames(path, names, labels)


def json_templates(path: str) -> Templates:
    """Read a JSON file of a list of prompt templates, or of an object of prompts by class name."""
    content: Any = files.read_json(path, object)
    if isinstance(content, dict):
        return checked_prompts(content, path)
    hint = '; prompts of single classes are an object, {"CLASS": ["PROMPT", ...]}'
    return _checked_templates(_texts(content, path), f"{path}, text", hint)


def _checked_templates(templates: Sequence[str], origin: str, hint: str = "") -> tuple[str, ...]:
    """Return templates with "{}" for the class name in place of "{c}"."""
    result = tuple(template.replace("{c}", "{}") for template in templates)
    for number, template in enumerate(result, 1):
        if "{}" not in template:
            raise ValueError(
                f'{origin} {number}: expected "{{}}" or "{{c}}" for the class name, got {template!r}{hint}'
            )
    return result


def checked_prompts(prompts: Mapping[str, Any], origin: str) -> dict[str, tuple[str, ...]]:
    """Return the prompts of each class as tuples of at least one text; a text is one prompt."""
    return {str(name): _texts(texts, f"{origin}, class {str(name)[:40]!r}") for name, texts in prompts.items()}


def class_templates(templates: Templates, names: Sequence[str], origin: str) -> tuple[Any, ...]:
    """Return the field `templates` of `Classes` from templates, which stay, or prompts of each class in `names`.

    Underscores of a class may be spaces in its name. A class name replaces "{}" and "{c}" in its prompts. `origin` is
    the file or setting of the templates, for messages.
    """
    if not isinstance(templates, Mapping):
        return tuple(templates)
    by_name = {_spaced(name): texts for name, texts in templates.items()} | dict(templates)
    chosen = [by_name.get(name, by_name.get(_spaced(name), ())) for name in names]
    missing = [name for name, texts in dict(zip(names, chosen, strict=True)).items() if not texts]
    unknown = [name for name in templates if _spaced(name) not in set(map(_spaced, names))]
    if missing:
        raise ValueError(
            f"{origin}: expected prompts of all {len(names)} classes, got none of {_some(missing)}"
            + (f"; no class has the name of {_some(unknown)}" if unknown else "")
        )
    if unknown:
        _logger.warning("%s: prompts without a class are not used: %s", origin, _some(unknown))
    return tuple(
        tuple(text.replace("{c}", name).replace("{}", name) for text in texts)
        for name, texts in zip(names, chosen, strict=True)
    )


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _some(names: Sequence[str]) -> str:
    """List at most three names."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _texts(value: Any, origin: str) -> tuple[str, ...]:
    """Return texts as a tuple; a text is one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ValueError(f"{origin}: expected texts, none of them empty, got {str(value)[:40]}")
    return tuple(text.strip() for text in texts)


def label_values(
    values: Collection[str], folder: str, data: str, own_names: Sequence[str] | None = None
) -> tuple[dict[str, int], Classes]:
    """Assign labels to the distinct label values of a dataset.

    With class names next to the data, a value is a class or a label. If no value is, and there are as many values as
    names, the sorted values have the names in order. Without class names, the sorted values are the classes. Integers
    need class names.

    Args:
      values: distinct values.
      folder: folder of the data.
      data: description of the data, for messages.
      own_names: class names of the data itself in label order, used without class names next to it.
    """
    if not values:
        raise ValueError(f"{data} has no labels; expected class names or integers")
    ordered = sorted(values)
    by_order = {value: label for label, value in enumerate(ordered)}
    names = read_class_names(folder)
    if names is None and own_names is not None:
        spaced = tuple(map(_spaced, own_names))
        names = ClassNames(data, spaced, {name: label for label, name in reversed(list(enumerate(spaced)))})
    integers = all(map(_INTEGER.fullmatch, ordered))
    if names is None:
        if integers:
            raise ValueError(
                f"{data} has the labels {', '.join(ordered[:3])}{', ...' if len(ordered) > 3 else ''} without class"
                f" names; put a {CLASS_FILES[0]} with one name per line into the folder {folder or '.'}"
            )
        return by_order, folder_classes(tuple(map(_spaced, ordered)), folder)
    known = names.labels.keys() & {*ordered, *map(_spaced, ordered)}
    if not integers and not known and len(ordered) == len(names.names):
        return by_order, folder_classes(names.names, folder)
    try:
        labels = {value: names.label(value) for value in ordered}
    except ValueError as error:
        raise ValueError(f"{data}: {error}") from None
    return labels, folder_classes(names.names, folder)


def folder_classes(names: tuple[str, ...], folder: str) -> Classes:
    """Return classes with the prompt templates next to the data, or `PHOTO_TEMPLATES`.

    `templates.txt` has one template per line, `templates.json` is read by `json_templates`.
    """
    templates: Templates = PHOTO_TEMPLATES
    path = _find(folder, (TEMPLATE_FILE, PROMPTS_FILE))
    if path is not None:
        is_json = path.endswith(".json")
        templates = json_templates(path) if is_json else _checked_templates(_lines(path), f"{path}, line")
    return Classes(names, class_templates(templates, names, path or ""))


def label_strings(column: pa.ChunkedArray, data: str) -> pa.ChunkedArray:
    """Convert a column of texts or numbers to strings, "" for null, NaN and -1, Hugging Face's value of no label."""
    try:
        strings = pc.utf8_trim_whitespace(pc.fill_null(column.cast(pa.string()), ""))
        strings = pc.replace_substring_regex(strings, r"^([+-]?\d+)\.0*$", r"\1")  # pandas writes integers as floats
        return pc.replace_substring_regex(strings, r"^(?:-1|nan|NaN)$", "")
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"{data}: expected class names or integers in UTF-8, got {reason}") from error


def column_labels(
    columns: Sequence[pa.ChunkedArray], folder: str, data: str, own_names: Sequence[str] | None = None
) -> tuple[list[np.ndarray], Classes]:
    """Assign labels to the rows of columns, results of `label_strings`; see `label_values`.

    Returns:
      int32 [rows] for each column, -1 without label, and the classes.
    """
    values = pc.unique(pa.chunked_array([pc.unique(column) for column in columns]))
    if len(values) > _MAX_CLASSES:
        raise ValueError(f"{data}: expected at most {_MAX_CLASSES} classes, got {len(values)} values")
    labels, classes = label_values(set(values.to_pylist()) - {""}, folder, data, own_names)
    by_value = np.array([labels.get(value, UNLABELED) for value in values.to_pylist()], np.int32)
    return [by_value[np.asarray(pc.index_in(column, values))] for column in columns], classes


def prompts(classes: Classes, label: int) -> tuple[str, ...]:
    """Make captions of a class, one per template, or its own prompts; none without a class."""
    if label == UNLABELED:
        return ()
    name, templates = classes.names[label], classes.templates
    own = templates[label] if isinstance(templates[0], tuple) else templates
    return tuple(text if own is not templates else text.replace("{}", name) for text in own)


def _find(folder: str, names: Collection[str]) -> str | None:
    """Find a file next to the data, or above the folder of a split."""
    folders = [folder]
    if splits.is_split(files.name_of(folder)):
        folders.append(folder.rpartition("/")[0])
    paths = [f"{parent}/{name}" if parent else name for parent in folders for name in names]
    return next(filter(files.is_file, paths), None)


def _lines(path: str) -> list[str]:
    try:
        lines = [line.strip() for line in files.read_file(path).decode("utf-8-sig").rstrip().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start}") from None
    if "" in lines:
        raise ValueError(f"{path}, line {lines.index('') + 1}: expected a text, got an empty line")
    return lines


def json_class_names(path: str) -> list[tuple[str, str]]:
    """Read (value, name) pairs in label order."""
    content: Any = files.read_json(path, object)
    if isinstance(content, list):
        pairs = [(name, name) for name in content]
    elif isinstance(content, dict):
        labels = [str(label) for label in range(len(content))]
        if sorted(map(str, content.values())) == sorted(labels):
            pairs = [(name, name) for name in sorted(content, key=lambda name: int(content[name]))]
        elif content.keys() == set(labels):
            pairs = [(label, content[label]) for label in labels]
        else:
            pairs = list(content.items())
    else:
        pairs = []
    if not pairs or not all(isinstance(name, str) and name.strip() for _, name in pairs):
        raise ValueError(
            f"{path}: expected a list of class names, or an object of names by value, got {str(content)[:40]}"
        )
    return pairs
