import io
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from infcl_jax.data import (
    BadRecordError,
    ByteTokenizer,
    classes,
    eval_batches,
    load_source,
    shapes,
    shapes_builder,
    train_iterator,
)
from infcl_jax.data.decode import decode_example

IMAGE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def png():
    buffer = io.BytesIO()
    Image.fromarray(IMAGE).save(buffer, format="png")
    return buffer.getvalue()


class Records(tfds.core.GeneratorBasedBuilder):
    """A TFDS dataset called `records` with any features and examples."""

    VERSION = tfds.core.Version("1.2.0")
    url_infos = None

    def __init__(self, *, features, examples, **kwargs):
        self._features, self._examples = features, examples
        super().__init__(**kwargs)

    def _info(self):
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate(self._examples)


def write_records(folder, features, examples, file_format="array_record"):
    Records(features=features, examples=examples, data_dir=folder, file_format=file_format).download_and_prepare()
    return folder


@pytest.fixture(scope="module")
def shapes_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    config = shapes_builder.ShapesConfig(name="tiny", image_size=16, train=600, validation=40, zero_shot=72)
    shapes_builder.Shapes(config=config, data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


@pytest.mark.parametrize("split,count", [("train", 600), ("validation", 40), ("zero_shot", 72)])
def test_shapes_on_disk_are_the_rendered_ones(shapes_dir, split, count):
    source = load_source("shapes/tiny", split, shapes_dir)
    assert len(source) == count and (source.name, source.split) == ("shapes/tiny", split)
    for index in (0, 1, count // 2, count - 1):
        example, sample = decode_example(source, index), shapes.render(split, index, 16)
        assert (example["image"] == sample.image).all() and example["image"].dtype == np.uint8
        assert (example["caption"], example["label"]) == (sample.caption, sample.label)
        assert example["captions"] == (sample.caption,)


def test_sources_survive_pickling(shapes_dir):
    for source in (load_source("shapes/tiny", "train", shapes_dir), load_source("digits", "train")):
        copy = pickle.loads(pickle.dumps(source))
        assert len(copy) == len(source) and np.all(copy[7]["image"] == source[7]["image"])


def test_part_of_a_split(shapes_dir):
    part = load_source("shapes/tiny", "train[100:110]", shapes_dir)
    assert len(part) == 10 and part[3]["caption"] == shapes.render("train", 103, 16).caption


def test_reading_needs_no_tensorflow_and_touches_no_accelerator(shapes_dir):
    # Worker processes run this code; a worker that initialized JAX would take accelerator memory.
    code = f"""
import sys
from infcl_jax.data import ByteTokenizer, load_source, train_iterator
source = load_source("shapes/tiny", "train", {str(shapes_dir)!r})
next(train_iterator(source, tokenizer=ByteTokenizer(), image_size=16, batch_size=4, seed=0))
assert "tensorflow" not in sys.modules
"""
    # Every use of a device raises on a platform that does not exist.
    environment = {**os.environ, "JAX_PLATFORMS": "none"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    "features,fields,expected",
    [
        ({"caption": tfds.features.Text()}, {"caption": "grün"}, ("grün",)),
        ({"captions": tfds.features.Sequence(tfds.features.Text())}, {"captions": ["a", "b"]}, ("a", "b")),
        (
            {"captions": tfds.features.Sequence({"id": tfds.features.Scalar(np.int64), "text": tfds.features.Text()})},
            {"captions": [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]},
            ("a", "b"),
        ),
    ],
)
def test_captions_of_any_layout(tmp_path, features, fields, expected):
    features = {"image": tfds.features.Image(), **features}
    write_records(tmp_path, features, [{"image": png(), **fields}] * 2)
    example = load_source("records", "train", tmp_path)[1]
    assert example["captions"] == expected and example["caption"] == expected[0] and example["label"] == -1
    assert example["image"] == png()
    with pytest.raises(
        ValueError, match=r"^expected records to have a label \(ClassLabel\) feature .*, got features .*image"
    ):
        classes(load_source("records", "train", tmp_path))


def test_labels_make_captions(tmp_path):
    features = {
        "image": tfds.features.Tensor(shape=IMAGE.shape, dtype=np.uint8),
        "label": tfds.features.ClassLabel(names=["tabby_cat", "dog"]),
    }
    write_records(tmp_path, features, [{"image": IMAGE, "label": "tabby_cat"}])
    source = load_source("records", "train", tmp_path)
    example, (names, templates) = source[0], classes(source)
    assert names == ("tabby cat", "dog") and len(templates) >= 5
    assert example["captions"] == tuple(template.format("tabby cat") for template in templates)
    assert example["label"] == 0 and (example["image"] == IMAGE).all()


@pytest.mark.parametrize("image", [b"not an image", png()[:60]])
def test_bad_record_names_itself(tmp_path, image):
    features = {"image": tfds.features.Image(), "caption": tfds.features.Text()}
    write_records(tmp_path, features, [{"image": png(), "caption": "a"}, {"image": image, "caption": "b"}])
    source = load_source("records", "train", tmp_path)
    assert source[0]["caption"] == "a"
    with pytest.raises(BadRecordError, match=r"bad record 1 of records, split train: .*[Ii]mage"):
        decode_example(source, 1)
    assert [example["caption"] for example in source.__getitems__([0, 0])] == ["a", "a"]
    with pytest.raises(IndexError):
        source[2]


def test_record_without_caption_names_itself(tmp_path):
    features = {"image": tfds.features.Image(), "captions": tfds.features.Sequence(tfds.features.Text())}
    write_records(tmp_path, features, [{"image": png(), "captions": ["a"]}, {"image": png(), "captions": []}])
    source = load_source("records", "train", tmp_path)
    with pytest.raises(BadRecordError, match=r"bad record 1 of records, split train: .*no captions"):
        source[1]
    with pytest.raises(BadRecordError, match="bad record among 0 to 1 of records, split train"):
        source.__getitems__([1, 0])


def test_bad_records_on_disk_are_replaced_in_training(tmp_path):
    features = {"image": tfds.features.Image(), "caption": tfds.features.Text()}
    examples = [{"image": b"broken" if index in (3, 4) else png(), "caption": str(index)} for index in range(12)]
    source = load_source("records", "train", write_records(tmp_path, features, examples))
    tokenizer = ByteTokenizer(context_length=8)
    iterator = train_iterator(source, tokenizer=tokenizer, image_size=6, batch_size=12, seed=0)
    batch = next(iterator)
    iterator.close()
    assert sorted(batch["index"].tolist()) == [0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    assert [tokenizer.decode(row) for row in batch["text"]] == [str(index) for index in batch["index"]]
    with pytest.raises(BadRecordError, match="bad record 3 of records, split train"):
        list(eval_batches(source, tokenizer=tokenizer, image_size=6, batch_size=12))


def test_newest_version_is_read(tmp_path):
    features = {"image": tfds.features.Image(), "caption": tfds.features.Text()}
    write_records(tmp_path, features, [{"image": png(), "caption": "old"}])
    for version in ("1.10.0", "1.9.0"):
        folder = tmp_path / "records" / version
        folder.mkdir()
        for path in (tmp_path / "records" / "1.2.0").iterdir():
            text = path.read_bytes()
            (folder / path.name).write_bytes(text.replace(b'"1.2.0"', b'"%s"' % version.encode()))
    assert "1.10.0" in str(load_source("records", "train", tmp_path)._records.dataset_info.data_dir)


@pytest.mark.parametrize("name", ["shapes/quickstart", "coco_captions/2014"])
def test_missing_dataset_says_what_to_run(tmp_path, name):
    command = f"python -m experiments.prepare_data --dataset={name} --data_dir={tmp_path}"
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / name))) as info:
        load_source(name, "train", tmp_path)
    assert command in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["shapes/huge", "shape", "", "digit"])
def test_unknown_name(tmp_path, name):
    with pytest.raises(ValueError, match="shapes/quickstart, shapes/full, digits"):
        load_source(name, "train", tmp_path)


def test_unknown_split(shapes_dir):
    with pytest.raises(ValueError, match="train, validation, zero_shot, got 'test'"):
        load_source("digits", "test")
    with pytest.raises(ValueError, match=r"split of shapes/tiny must be one of .*train.*, got 'test'"):
        load_source("shapes/tiny", "test", shapes_dir)


@pytest.mark.parametrize(
    "features,match", [({"x": np.int64}, "image feature"), ({"image": tfds.features.Image()}, "caption")]
)
def test_unusable_features(tmp_path, features, match):
    examples = [{"x": 1} if "x" in features else {"image": png()}]
    write_records(tmp_path, features, examples)
    with pytest.raises(ValueError, match=f"records must have .*{match}"):
        load_source("records", "train", tmp_path)


def test_digits_are_split_by_class_without_overlap():
    sources = {split: load_source("digits", split) for split in ("train", "validation", "zero_shot")}
    images = {split: {source[i]["image"].tobytes() for i in range(len(source))} for split, source in sources.items()}
    assert sum(map(len, sources.values())) == 1797
    assert sum(map(len, images.values())) == len(set.union(*images.values())) == 1797
    for split, fraction in (("train", 0.70), ("validation", 0.15), ("zero_shot", 0.15)):
        labels = np.array([sources[split][i]["label"] for i in range(len(sources[split]))])
        np.testing.assert_allclose(np.bincount(labels, minlength=10) / (1797 * fraction), 0.1, atol=0.01)


def test_digits_captions_and_classes():
    train, source = (load_source("digits", split) for split in ("train", "validation"))
    names, templates = classes(source)
    for index in range(0, len(source), 17):
        example = train[index]
        words = (names[example["label"]], str(example["label"]))
        assert set(example["captions"]) == {template.format(word) for template in templates for word in words}
        example = source[index]
        words = (names[example["label"]], str(example["label"]))
        assert example["captions"] == (example["caption"],)
        assert example["caption"] in {template.format(word) for template in templates for word in words}
        assert example["image"].shape == (32, 32, 3) and example["image"].dtype == np.uint8
    assert len({source[index]["caption"].replace(str(source[index]["label"]), "#") for index in range(20)}) >= 5


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        load_source("digits", "train")


@pytest.mark.parametrize("name", ["shapes/tiny", "digits"])
def test_templates_take_every_class_name(name, shapes_dir):
    names, templates = classes(load_source(name, "train", shapes_dir))
    prompts = {template.format(class_name) for template in templates for class_name in names}
    assert len(prompts) == len(names) * len(templates) and len(templates) >= 5
    assert all(class_name in template.format(class_name) for template in templates for class_name in names)
