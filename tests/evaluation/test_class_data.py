"""Built-in class names and templates, and the readers of such files."""

import fnmatch
import pathlib
import tomllib

import pytest

from infcl_jax.evaluation import class_data, class_data_names, read_class_names, read_templates

# Classes and templates as the data sets' papers, CLIP (appendix A) and VTAB count them.
COUNTS = {
    "birdsnap": (500, 1),
    "caltech101": (102, 34),
    "caltech101_vtab": (102, 34),
    "cars": (196, 8),
    "cifar10": (10, 18),
    "cifar100": (100, 18),
    "clevr_closest_object_distance": (6, 1),
    "clevr_count_all": (8, 1),
    "country211": (211, 5),
    "diabetic_retinopathy": (5, 1),
    "dmlab": (6, 1),
    "dsprites_label_orientation": (40, 4),
    "dsprites_label_x_position": (32, 1),
    "dtd": (47, 8),
    "eurosat": (10, 3),
    "fer2013": (7, 6),
    "fgvc_aircraft": (100, 2),
    "flowers": (102, 1),
    "food101": (101, 1),
    "gtsrb": (43, 3),
    "hateful_memes": (2, 1),
    "imagenet1k": (1000, 80),
    "imagenet_a": (200, 80),
    "imagenet_o": (200, 80),
    "imagenet_r": (200, 80),
    "imagenet_sketch": (1000, 80),
    "imagenetv2": (1000, 80),
    "kinetics700": (700, 28),
    "kitti_closest_vehicle_distance": (4, 1),
    "mnist": (10, 1),
    "objectnet": (113, 80),
    "pcam": (2, 2),
    "pets": (37, 1),
    "renderedsst2": (2, 1),
    "resisc45": (45, 4),
    "smallnorb_label_azimuth": (18, 4),
    "smallnorb_label_elevation": (9, 4),
    "stl10": (10, 2),
    "sun397": (397, 2),
    "svhn": (10, 6),
    "ucf101": (101, 48),
    "voc2007": (20, 1),
}
# "missile" and "sunglasses" name two classes each in OpenAI's list.
REPEATED = {"imagenet1k": 2, "imagenetv2": 2, "imagenet_sketch": 2}


def test_every_data_set_is_counted():
    assert class_data_names() == tuple(sorted(COUNTS))


@pytest.mark.parametrize("name", COUNTS)
def test_classes_and_templates(name):
    data = class_data(name)
    assert (len(data.classes), len(data.templates)) == COUNTS[name]
    assert len(set(data.classes)) == len(data.classes) - REPEATED.get(name, 0)
    assert len(set(data.templates)) == len(data.templates)
    assert all(template.count("{}") == 1 and template.count("{") == 1 for template in data.templates)
    assert all(text == text.strip() and "_" not in text for text in data.classes)
    assert data.source
    for of_class in (data.folders, data.imagenet):
        assert of_class is None or len(of_class) == len(data.classes)
    assert data.folders is None or len(set(data.folders)) == len(data.folders)


@pytest.mark.parametrize("name", ["imagenet_a", "imagenet_o", "imagenet_r"])
def test_imagenet_subset_agrees_with_imagenet(name):
    data, imagenet = class_data(name), class_data("imagenet1k")
    labels = [label for (label,) in data.imagenet]
    assert labels == sorted(labels)
    assert data.classes == tuple(imagenet.classes[label] for label in labels)
    assert data.folders == tuple(imagenet.folders[label] for label in labels)
    assert data.folders == tuple(sorted(data.folders))


def test_imagenet_folders_are_wordnet_ids():
    imagenet = class_data("imagenet1k")
    assert imagenet.folders[0] == "n01440764" and imagenet.classes[0] == "tench"
    assert imagenet.folders == tuple(sorted(imagenet.folders))
    assert class_data("ImageNet-Sketch").folders == imagenet.folders
    assert class_data("imagenetv2").folders[999] == "999"


def test_objectnet_covers_imagenet_classes():
    data, names = class_data("objectnet"), class_data("imagenet1k").classes
    covered = {name: [names[i] for i in labels] for name, labels in zip(data.classes, data.imagenet, strict=True)}
    assert covered["alarm clock"] == ["analog clock", "digital clock"]
    assert covered["bicycle"] == ["mountain bike", "tandem bicycle"]
    assert covered["wok"] == ["wok"]
    assert len({label for labels in data.imagenet for label in labels}) == sum(map(len, data.imagenet))
    assert data.folders == tuple(sorted(data.folders))


def test_label_order_of_data_sets_that_other_lists_sort_otherwise():
    assert class_data("eurosat").classes[:2] == ("annual crop land", "forest")
    assert class_data("voc2007").classes[10:12] == ("diningtable", "dog")
    assert class_data("sun397").classes[206:208] == ("jail indoor", "jail cell")
    assert class_data("food101").classes[16:18] == ("cheese plate", "cheesecake")
    assert class_data("pets").classes[1] == "American Bulldog"


def test_unknown_data_set_names_close_ones():
    with pytest.raises(ValueError, match=r"such as cifar100.*got 'cifar1000'"):
        class_data("cifar1000")


def test_class_files_are_in_the_wheel():
    root = pathlib.Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["infcl_jax.evaluation"]
    files = [f"classes/{path.name}" for path in (root / "infcl_jax/evaluation/classes").iterdir()]
    assert all(any(fnmatch.fnmatch(file, pattern) for pattern in patterns) for file in files)


def test_read_class_names_keeps_label_order_and_empty_names(tmp_path):
    path = tmp_path / "classnames.txt"
    path.write_text("near\r\n\r\n distant \n\n", encoding="utf-8")
    assert read_class_names(path) == ("near", "", "distant")


def test_read_templates_accepts_both_placeholders(tmp_path):
    path = tmp_path / "zeroshot_classification_templates.txt"
    path.write_text("a photo of {c}.\nthe {}\n", encoding="utf-8")
    assert read_templates(path) == ("a photo of {}.", "the {}")


@pytest.mark.parametrize("line", ["a photo", "a photo of {name}", "{c} of {x}", "{c", ""])
def test_read_templates_refuses_other_placeholders(tmp_path, line):
    path = tmp_path / "templates.txt"
    path.write_text(f"{{c}}\n{line}\n{{c}}", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: expected"):
        read_templates(path)


@pytest.mark.parametrize(("content", "message"), [(b"\n \n", "empty file"), (b"caf\xe9", "not UTF-8: byte 3")])
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "classnames.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_class_names(path)
