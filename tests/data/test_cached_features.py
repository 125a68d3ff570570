"""Cached features: complete after a kill, verified, shared by processes, read in place of images and captions."""

import contextlib
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.data import (
    Augmentation,
    BadRecordError,
    ByteTokenizer,
    TowerInput,
    cache_features,
    check_deterministic,
    feature_key,
    train_iterator,
)
from infcl_jax.data.sources.base import bad_record, describe

SAMPLES, SIDE, SEGMENT, ROWS, BAD = 22, 8, 5, 4, 7
TOKENIZER = ByteTokenizer(16, "none")
IMAGE, TEXT = TowerInput("image", SIDE, TOKENIZER), TowerInput("text", SIDE, TOKENIZER)
CENTER = Augmentation(scale=(1.0, 1.0))


class Source:
    """Random images with one to three captions; one of them is damaged."""

    name, split = "random", "train"

    def __init__(self, samples=SAMPLES, word="image"):
        self._samples, self._word = samples, word

    def __len__(self):
        return self._samples

    def __getitem__(self, index):
        if index == BAD:
            raise bad_record(describe(self, index), "no pixels")
        image = np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        captions = tuple(f"{self._word} {index} {n}" for n in range(1 + index % 3))
        return {"image": image, "caption": captions[0], "captions": captions, "label": -1}


class NoImages(Source):
    def __getitem__(self, index):
        raise AssertionError("the source is read")


class Encode:
    """Sum and maximum of each row; fails after some calls."""

    def __init__(self, calls=1000, dtype=np.float32):
        self.left, self.dtype = calls, dtype

    def __call__(self, rows):
        assert len(rows) == ROWS
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        flat = rows.reshape(len(rows), -1).astype(np.float32)
        return np.stack([flat.sum(axis=1), flat.max(axis=1)], axis=1).astype(self.dtype)


def cache(folder, tower=IMAGE, encode=None, key="0123456789abcdef", source=None, **options):
    arguments = Source() if source is None else source, tower, encode or Encode(), ROWS, folder, key
    return cache_features(*arguments, threads=2, segment_samples=SEGMENT, **options)


def expected_features(tower, index):
    example = Source()[index]
    rows = example["image"][None] if tower is IMAGE else TOKENIZER(example["captions"])
    return Encode()(np.concatenate([rows, np.zeros((ROWS - len(rows), *rows.shape[1:]), rows.dtype)]))[: len(rows)]


def segments(store):
    return {path.name: path.stat().st_ino for path in store.folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tower", [IMAGE, TEXT], ids=["image", "text"])
def test_every_sample_has_its_features(tmp_path, tower, dtype):
    store = cache(tmp_path, tower, Encode(dtype=jnp.dtype(dtype)))
    for index in set(range(SAMPLES)) - {BAD}:
        assert store.features(index).dtype == dtype
        np.testing.assert_array_equal(store.features(index), expected_features(tower, index).astype(dtype))
        if tower is IMAGE:
            assert store.captions(index) == Source()[index]["captions"]
    assert len(store.features(BAD)) == 0


def test_a_killed_computation_continues(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path, encode=Encode(calls=5))  # two calls a segment
    encode = Encode()
    store = cache(tmp_path, encode=encode)
    before = segments(store)
    assert 1000 - encode.left == 2 + 1  # of the last two segments; the last one has two samples
    cache(tmp_path, encode=Encode(calls=0))
    assert segments(store) == before and len(before) == 5


def test_processes_share_the_segments(tmp_path):
    first = cache(tmp_path, process_index=0, process_count=2)
    assert len(segments(first)) == 3
    store = cache(tmp_path, process_index=1, process_count=2)
    assert len(segments(store)) == 5
    np.testing.assert_array_equal(store.features(6), expected_features(IMAGE, 6))


def truncate(path, _):
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path, _):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_foreign(path, folder):
    other = cache(folder / "other", key="f" * 16)
    path.write_bytes(other.path(2).read_bytes())


@pytest.mark.parametrize(
    ("damage", "problem"), [(truncate, "damaged"), (flip_bit, "damaged"), (replace_foreign, "foreign")]
)
def test_a_damaged_or_foreign_segment_is_computed_again(tmp_path, caplog, damage, problem):
    store = cache(tmp_path)
    before = segments(store)
    damage(store.path(2), tmp_path)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        repaired = cache(tmp_path)
    (line,) = caplog.messages
    assert f"{store.path(2)} is {problem}" in line
    np.testing.assert_array_equal(repaired.features(11), expected_features(IMAGE, 11))
    assert {name for name, node in segments(repaired).items() if node != before[name]} <= {store.path(2).name}


def test_the_key_is_of_weights_transform_tokenizer_and_dataset():
    weights = {"kernel": np.ones(3, np.float32)}
    others = [
        (Source(), IMAGE, "tower", {"kernel": np.array([1, 1, 2], np.float32)}),
        (Source(), IMAGE, "tower", {"bias": weights["kernel"]}),
        (Source(), IMAGE, "wider tower", weights),
        (Source(), IMAGE._replace(image_size=9), "tower", weights),
        (Source(SAMPLES - 1), IMAGE, "tower", weights),
        (Source(word="photo"), IMAGE, "tower", weights),
        (Source(), TEXT, "tower", weights),
        (Source(), TEXT._replace(tokenizer=ByteTokenizer(16, "lower")), "tower", weights),
    ]
    keys = [feature_key(*arguments) for arguments in [(Source(), IMAGE, "tower", weights), *others]]
    assert keys[0] == feature_key(Source(), IMAGE, "tower", {"kernel": np.ones(3, np.float32)})
    assert len(set(keys)) == len(keys)


def test_random_images_are_refused():
    check_deterministic(CENTER)
    with pytest.raises(ValueError, match=r"got augmentation.scale=\(0.9, 1.0\), augmentation.shift=2; set .*shift=0"):
        check_deterministic(Augmentation(shift=2))


@pytest.mark.parametrize("towers", [("image",), ("text",), ("image", "text")], ids=str)
def test_batches_have_the_features_of_the_same_samples_and_captions(tmp_path, towers):
    stores = {tower.name: cache(tmp_path, tower) for tower in (IMAGE, TEXT) if tower.name in towers}
    source = NoImages() if "image" in towers else Source()
    settings = {"tokenizer": TOKENIZER, "image_size": SIDE, "batch_size": 4, "seed": 0, "augmentation": CENTER}

    def batches(source, **options):
        data = train_iterator(source, num_workers=0, num_threads=1, **settings, **options)
        with contextlib.closing(data):
            rows = [next(data) for _ in range(12)]  # two epochs
            return rows, data.bad_records.indices()

    got, bad = batches(source, features=stores)
    expected, expected_bad = batches(Source())
    assert bad == expected_bad == [BAD]
    for batch, reference in zip(got, expected, strict=True):
        np.testing.assert_array_equal(batch["index"], reference["index"])
        for name in ("image", "text"):
            rows = Encode()(reference[name]) if name in towers else reference[name]
            np.testing.assert_array_equal(batch[name], rows)


def test_a_bad_sample_keeps_its_message(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        store = cache(tmp_path)
    (line,) = caplog.messages
    message = "bad record 7 of random, split train: no pixels"
    assert f"{store.path(1)} is without 1 samples that cannot be read, such as {message}" in line
    with pytest.raises(BadRecordError, match=message):
        store.captions(BAD)
