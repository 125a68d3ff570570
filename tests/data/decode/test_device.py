"""Decoding on devices, with a decoder that stands in for a GPU's."""

import collections
import io
import itertools

import jax
import numpy as np
import pytest
from decoders import StandIn
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image

from infcl_jax.data import Augmentation, BadRecordError, ByteTokenizer, train_iterator
from infcl_jax.data.decode import device as device_decoding
from infcl_jax.data.decode.device import MAX_DEVICE_PIXELS, EncodedImage, encoded_image
from infcl_jax.data.iterator import concatenate
from infcl_jax.data.transforms import Box, Geometry
from infcl_jax.runtime.mesh import data_mesh

SIZE, BATCH = 16, 24
TABLES = b"\xff\xdb"  # quantization tables of a JPEG
TOKENIZER = ByteTokenizer(context_length=16)
AUGMENTATION = Augmentation(scale=(0.5, 1.0), shift=2, flip=0.5)


def contents(index, format="jpeg", size=(22, 25), mode="RGB", **options):
    pixels = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size).convert(mode).save(file, format, **options)
    return file.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def undecodable(index):
    """A JPEG with a good header, but without quantization tables."""
    data = contents(index)
    return data[: data.index(TABLES)] + data[data.index(b"\xff\xc0") :]


# File of a sample by its index modulo 10, for devices or for the host.
FILES = {
    **dict.fromkeys(range(10), contents),
    1: lambda index: contents(index, mode="L"),
    2: lambda index: contents(index, "png"),
    3: lambda index: contents(index, exif=exif(6)),
    4: lambda index: contents(index, mode="CMYK"),
    5: lambda index: contents(index, progressive=True),
    6: lambda index: contents(index) + b"\0\0",
}
BAD = {
    7: lambda index: contents(index)[:-30],
    17: lambda index: b"<html>",
    27: lambda index: contents(index, size=(1, 1)),
}
UNDECODABLE = {33: undecodable, 34: undecodable, 44: lambda index: b""}


PIXELS = np.full((20, 30, 3), 200, np.uint8)


class Files:
    """Samples of many kinds, with two captions."""

    name, split = "files", "train"

    def __init__(self, bad=()):
        self.bad = dict(bad)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == 50:
            raise BadRecordError("bad record 50")
        image = PIXELS if index == 51 else self.bad.get(index, FILES[index % 10])(index)
        captions = (f"{index}/0", f"{index}/1")
        return {"image": image, "caption": captions[0], "captions": captions, "label": -1}


class Run:
    """Iterators over `Files`, decoded by the host or by stand-ins on `devices` of each process."""

    def __init__(self, bad=(), devices=4, refuses=lambda data: False):
        self.source, self.refuses = Files(bad), refuses
        self.devices = jax.devices()[:devices]
        self.sharding = NamedSharding(data_mesh(self.devices), PartitionSpec("data"))
        self.stand_ins = {}

    def iterator(self, on_device, **options):
        if on_device:
            self.stand_ins = {device: StandIn(device, self.refuses) for device in self.devices}
            options |= {"decoders": self.stand_ins, "sharding": self.sharding}
        kwargs = {
            "tokenizer": TOKENIZER,
            "image_size": SIZE,
            "batch_size": BATCH,
            "seed": 3,
            "augmentation": AUGMENTATION,
        }
        return train_iterator(self.source, **(kwargs | options))

    def batches(self, count, on_device, **options):
        iterator = self.iterator(on_device, **options)
        batches = [jax.device_get(batch) for batch in itertools.islice(iterator, count)]
        bad = iterator.bad_records.counts()
        iterator.close()
        return batches, bad


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys() == {"image", "text", "index"}
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.parametrize(
    ("bad", "devices"), [({}, 4), (BAD, 1), (BAD | UNDECODABLE, 4)], ids=["good", "bad", "undecodable"]
)
def test_devices_give_the_batches_of_the_host(bad, devices):
    run = Run(bad, devices, refuses=lambda data: TABLES not in data)
    expected, counts = run.batches(5, on_device=False)
    batches, device_counts = run.batches(5, on_device=True)
    assert_equal(batches, expected)
    assert device_counts == counts == {"files": 1 + len(bad)}
    decoded = sum(stand_in.decoded for stand_in in run.stand_ins.values())
    assert 5 * BATCH * 0.5 < decoded < 8 * BATCH * 0.75  # up to three batches are prefetched


@pytest.mark.parametrize("share", [2, 1])
def test_refused_files_fall_back_to_the_host(share):
    run = Run(BAD | UNDECODABLE, refuses=lambda data: sum(data) % share == 0 or TABLES not in data)
    expected, counts = run.batches(5, on_device=False)
    batches, device_counts = run.batches(5, on_device=True)
    assert_equal(batches, expected)
    assert device_counts == counts == {"files": 7}
    assert (sum(stand_in.decoded for stand_in in run.stand_ins.values()) == 0) == (share == 1)


def test_reduced_host_decoding_has_the_same_crops(monkeypatch):
    monkeypatch.setattr(Files, "__getitem__", lambda self, index: {
        "image": contents(index, size=(120, 90)), "caption": "", "captions": ("",), "label": -1})  # fmt: skip
    run = Run()
    (host,), (decoded,) = (run.batches(1, on_device)[0] for on_device in (False, True))
    difference = np.abs(host["image"].astype(int) - decoded["image"])
    assert 0 < difference.max() <= 16 and difference.mean() < 1


def test_entries_without_rows_are_concatenated():
    run = Run(refuses=lambda data: data == contents(1))
    images = [EncodedImage(contents(row), Geometry(Box(0, 0, 9, 9))) for row in range(4)]

    def host_rows(pairs):
        assert pairs == [(11, 5)]
        image = np.full((1, SIZE, SIZE, 3), 9, np.uint8)
        return {"image": image, "text": np.array([[3]]), "index": np.array([6]), "bad": np.array([5])}

    stand_ins = {device: StandIn(device, run.refuses) for device in run.devices}
    stage = device_decoding.DeviceStage(stand_ins, run.sharding, host_rows, SIZE)
    chunks = [
        {"text": rows[:, None], "index": 4 + rows, "bad": np.array([1 + half])}
        | device_decoding.pack(10 + rows, [images[row] for row in rows])
        for half, rows in enumerate(np.split(np.arange(4), 2))
    ]
    result = stage.complete(stage(concatenate(chunks)))
    assert result["text"].tolist() == [[0], [3], [2], [3]] and result["index"].tolist() == [4, 6, 6, 7]
    assert result["bad"].tolist() == [1, 2, 5]
    assert (result["image"][1] == 9).all() and result.keys() == {"image", "text", "index", "bad", "stats"}


@pytest.mark.parametrize("stop", [1, 4])
def test_resume_continues_exactly(stop):
    run = Run(BAD | UNDECODABLE, refuses=lambda data: TABLES not in data)
    expected, _ = run.batches(stop + 3, on_device=False)
    iterator = run.iterator(on_device=True)
    list(itertools.islice(iterator, stop))
    state = iterator.get_state()
    resumed = run.iterator(on_device=True)
    resumed.set_state(state)
    for stopped in (iterator, resumed):
        assert_equal([jax.device_get(batch) for batch in itertools.islice(stopped, 3)], expected[stop:])
        stopped.close()


@pytest.mark.slow  # starts processes
def test_workers_pack_the_same_files():
    run = Run(BAD)
    expected, _ = run.batches(2, on_device=False)
    assert_equal(run.batches(2, on_device=True, num_workers=2)[0], expected)


def test_results_of_decoders_stay_until_they_are_read():
    run = Run()
    iterator = run.iterator(on_device=True, prefetch_batches=1)
    stage = iterator._finish
    for _ in range(5):
        image = next(iterator)["image"]
        assert image.sharding == run.sharding and image.shape == (BATCH, SIZE, SIZE, 3)
        assert len(stage._staged) <= device_decoding.STAGED_BATCHES + 1
    iterator.close()


@pytest.mark.parametrize(
    "data,on_device",
    [
        (contents(0), True),
        (contents(0) + b"\0" * 20, True),
        (contents(0, progressive=True), True),
        (contents(0, exif=exif(1)), True),
        (contents(0, exif=exif(3)), False),
        (contents(0)[:-2], False),
        (contents(0, "webp"), False),
        (contents(0, mode="CMYK"), False),
        (contents(0, size=(4097, 4096)), False),
        (contents(0, size=(4096, 4096)), True),
    ],
)
def test_devices_get_the_files_that_they_can_decode(data, on_device):
    sizes = []
    encoded = encoded_image(data, lambda *size: sizes.append(size) or Geometry(Box(0, 0, 1, 1)))
    assert isinstance(encoded, EncodedImage) == on_device
    assert len(sizes) == on_device
    assert MAX_DEVICE_PIXELS == 4096**2


def test_decoders_need_an_augmentation():
    with pytest.raises(ValueError, match="expected an augmentation and a sharding with decoders"):
        Run().iterator(on_device=True, augmentation=None)


def test_kinds_of_files_are_all_used():
    batches, _ = Run().batches(3, on_device=True)
    kinds = collections.Counter(index % 10 for batch in batches for index in batch["index"].tolist())
    assert kinds.keys() == set(range(10))
