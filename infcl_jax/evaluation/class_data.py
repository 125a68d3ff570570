"""Class names and prompt templates of public data sets, and readers of such files."""

import dataclasses
import difflib
import functools
import json
from importlib import resources
from pathlib import Path

from infcl_jax.data.sources import files
from infcl_jax.data.sources.labels import Templates, json_class_names, json_templates
from infcl_jax.inference.prompts import checked_template

_FOLDER = resources.files("infcl_jax.evaluation") / "classes"


@dataclasses.dataclass(frozen=True)
class ClassData:
    """Class names and prompt templates of a data set.

    Examples:
      >>> data = class_data("cifar10")
      >>> data.classes[:3], len(data.templates)
      (('airplane', 'automobile', 'bird'), 18)

    Attributes:
      classes: class names in label order. Names may repeat, as in ImageNet-1k, or be empty, as in CLEVR distance.
      templates: prompt templates with "{}" for the class name.
      source: origin of the names and templates.
      folders: folder name of each class in the data set's own layout, such as WordNet ids of ImageNet; None: unknown.
      imagenet: ImageNet-1k labels that each class covers; None: not an ImageNet variant.
    """

    classes: tuple[str, ...]
    templates: tuple[str, ...]
    source: str
    folders: tuple[str, ...] | None = None
    imagenet: tuple[tuple[int, ...], ...] | None = None


@functools.cache
def class_data_names() -> tuple[str, ...]:
    """Return the names of the built-in data sets, sorted.

    Examples:
      >>> "imagenet1k" in class_data_names()
      True
    """
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir()))


@functools.cache
def class_data(name: str) -> ClassData:
    """Return the class names and prompt templates of a public data set.

    Names are clip_benchmark's, such as "imagenet1k", "imagenet-a", "objectnet", "cifar100" or "sun397". Class
    order is the label order of torchvision or VTAB. ImageNet's templates are the 80 of CLIP (Radford et al. 2021,
    arXiv:2103.00020, appendix A).

    Examples:
      >>> class_data("imagenet1k").classes[:2]
      ('tench', 'goldfish')

    Args:
      name: name of the data set; "-" and "_", upper and lower case are equal.

    Returns:
      Class names, templates and their source.

    Raises:
      ValueError: the data set is unknown.
    """
    key = name.lower().replace("-", "_")
    if key not in class_data_names():
        close = difflib.get_close_matches(key, class_data_names()) or class_data_names()
        raise ValueError(
            f"expected a data set with built-in classes, such as {', '.join(close)}, got {name!r}; or give files with"
            " class names and templates"
        )
    fields = json.loads((_FOLDER / f"{key}.json").read_text(encoding="utf-8"))
    covered, folders = (fields.get(name) for name in ("imagenet", "folders"))
    if "base" in fields:  # which has the missing fields
        parent = class_data(fields["base"])
        covered = covered or [[label] for label in range(len(parent.classes))]
        folders = folders or [parent.folders[labels[0]] for labels in covered]
        own_classes = [parent.classes[labels[0]] for labels in covered]
        fields = {"classes": own_classes, "templates": parent.templates} | fields
    return ClassData(
        tuple(fields["classes"]),
        tuple(fields["templates"]),
        fields["source"],
        None if folders is None else tuple(folders),
        None if covered is None else tuple(map(tuple, covered)),
    )


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Read class names, one a line in label order.

    The format is as in `classnames.txt` of clip_benchmark's webdatasets. A blank line inside the file is an empty
    class name, as there. Blank lines at the end are ignored. A `.json` file is a list of names.

    Examples:
      >>> read_class_names("classnames.txt")
      ('robin', 'wren')

    Args:
      path: UTF-8 text or JSON file, local or a URL that `fsspec` reads.

    Returns:
      The class names.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not UTF-8, or has no class names.
    """
    if str(path).endswith(".json"):
        return tuple(name for _, name in json_class_names(str(path)))
    return _lines(path, "class names")


def read_templates(path: str | Path) -> Templates:
    """Read prompt templates, one a line.

    The format is as in `zeroshot_classification_templates.txt` of clip_benchmark's webdatasets. A `.json` file is a
    list of templates, or an object of the prompts of each class, as CuPL's (Pratt et al. 2023,
    arXiv:2209.03320).

    Examples:
      >>> read_templates("templates.txt")
      ('a photo of a {}.',)

    Args:
      path: UTF-8 text or JSON file, local or a URL that `fsspec` reads. "{c}" or "{}" is the place of the class name.

    Returns:
      Templates with "{}" for the class name, or prompts by class name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not UTF-8, has no templates, or a template has no place or another placeholder.
    """
    if str(path).endswith(".json"):
        return json_templates(str(path))
    lines = enumerate(_lines(path, "templates"), 1)
    return tuple(checked_template(line, f"{path}, line {number}") for number, line in lines)


def _lines(path: str | Path, content: str) -> tuple[str, ...]:
    try:
        text = files.read_file(str(path)).decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start}") from None
    if not text:
        raise ValueError(f"expected {content} in {path}, one a line, got an empty file")
    return tuple(line.strip() for line in text.split("\n"))
