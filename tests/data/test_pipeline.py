import collections
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time

import cloudpickle
import grain
import numpy as np
import pytest

from infcl_jax.data import (
    Augmentation,
    BadRecordError,
    ByteTokenizer,
    eval_batches,
    parallelism,
    train_iterator,
)
from infcl_jax.data.reader import BadRecords, bad_record_limit

TOKENIZER = ByteTokenizer(context_length=16)


class MemorySource:
    """Examples whose image and caption tell their index; some of them bad."""

    name, split = "memory", "train"

    def __init__(self, size, captions=1, bad=(), ragged=False):
        self.size, self.captions, self.bad, self.ragged = size, captions, set(bad), ragged

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise BadRecordError(f"bad record {index} of {self.name}, split {self.split}")
        image = np.full((10, 12, 3), index % 256, np.uint8)
        image[:, ::2] //= 2
        count = 1 + index % self.captions if self.ragged else self.captions
        captions = tuple(f"{index}/{form}" for form in range(count))
        return {"image": image, "caption": captions[0], "captions": captions, "label": index % 5}


def batches(source, count, *, batch_size=12, seed=0, **kwargs):
    iterator = train_iterator(source, tokenizer=TOKENIZER, image_size=8, batch_size=batch_size, seed=seed, **kwargs)
    result = list(itertools.islice(iterator, count))
    iterator.close()
    return result


def assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def indices(batches):
    return [batch["index"].tolist() for batch in batches]


def test_batch_contents():
    (batch,) = batches(MemorySource(40), 1, augmentation=None)
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "image": ((12, 8, 8, 3), "uint8"),
        "text": ((12, 16), "int32"),
        "index": ((12,), "int64"),
    }
    for row, index in enumerate(batch["index"]):
        assert TOKENIZER.decode(batch["text"][row]) == f"{index}/0"
        assert batch["image"][row].max() <= index


def test_epochs_are_reshuffled_and_repeat_no_sample():
    rows = np.concatenate(indices(batches(MemorySource(40), 9))).tolist()
    epochs = [rows[36 * e : 36 * e + 36] for e in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 36 and set(epoch) < set(range(40))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(range(40)) - set(epoch) for epoch in epochs}) > 1  # other samples are left over


def test_seed_decides_the_order():
    source = MemorySource(40)
    assert_equal(batches(source, 4, seed=3), batches(source, 4, seed=3))
    assert indices(batches(source, 4, seed=3)) != indices(batches(source, 4, seed=4))


@pytest.mark.parametrize("process_count", [2, 3, 12])
def test_global_batch_is_the_same_for_any_number_of_processes(process_count):
    source = MemorySource(40, captions=3)
    parts = [batches(source, 7, process_index=p, process_count=process_count) for p in range(process_count)]
    joined = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, batches(source, 7))


@pytest.mark.parametrize("process_count", [1, 3])
def test_the_samples_of_every_batch_are_known(process_count):
    expected = indices(batches(MemorySource(40), 7))  # three batches an epoch
    settings = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "seed": 0}
    processes = {"process_index": process_count - 1, "process_count": process_count}
    iterator = train_iterator(MemorySource(40), **settings, **processes)
    assert [iterator.batch_indices(number) for number in range(7)] == expected
    local = 12 // process_count
    assert [iterator._rows[row][1] for row in range(5 * local, 6 * local)] == expected[5][-local:]
    iterator.close()


class HangingSource(MemorySource):
    """Records in files of ten, one of which is not read until `released`."""

    def __init__(self, size, hangs):
        super().__init__(size)
        self.hangs, self.released = hangs, threading.Event()

    def __getitem__(self, index):
        assert index != self.hangs or self.released.wait(60)
        return super().__getitem__(index)

    def shard(self, index):
        return f"{index // 10}.tar"


def test_the_chunk_for_which_a_batch_waits_is_named(monkeypatch):
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", 4)
    second_batch = indices(batches(MemorySource(40), 2))[1]
    chunk = second_batch[4:8]
    source = HangingSource(40, hangs=chunk[-1])
    shards = list(dict.fromkeys(f"{index // 10}.tar" for index in chunk))
    more = " and 1 more" if len(shards) > 3 else ""
    expected = f"batch 2, 4 records of memory in {', '.join(shards[:3])}{more}, a reading thread"
    iterator = train_iterator(source, tokenizer=TOKENIZER, image_size=8, batch_size=12, seed=0, num_threads=1)
    next(iterator)
    deadline = time.monotonic() + 60
    while iterator.awaited() != expected:
        assert time.monotonic() < deadline, iterator.awaited()
        time.sleep(0.01)
    source.released.set()
    assert next(iterator)["index"].tolist() == second_batch
    iterator.close()


@pytest.mark.parametrize("chunk,num_threads", [(1, 1), (5, 3), (4, 2)])
def test_chunks_and_threads_do_not_change_the_batches(monkeypatch, chunk, num_threads):
    source = MemorySource(40, captions=3)
    whole = batches(source, 7)
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", chunk)
    assert_equal(batches(source, 7, num_threads=num_threads), whole)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_a_batch_can_be_read_in_parts_and_again(monkeypatch, chunk):
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", chunk)
    first, second, third = batches(MemorySource(40), 3)
    iterator = train_iterator(MemorySource(40), tokenizer=TOKENIZER, image_size=8, batch_size=12, seed=0)
    assert_equal([next(iterator)], [first])
    reader = iterator.next_reader()
    for spans in ([slice(0, 12)], [slice(1, 3), slice(7, 12)], [slice(11, 12), slice(0, 1)]):
        expected = {key: np.concatenate([array[span] for span in spans]) for key, array in second.items()}
        assert_equal([reader.read(spans)], [expected])
    assert iterator.get_state()["next_batch"] == 2
    assert_equal([next(iterator)], [third])
    iterator.close()


def test_augmentation_differs_between_samples_and_epochs():
    source = MemorySource(12)
    plain = batches(source, 2, augmentation=None)
    images = [
        dict(zip(b["index"], b["image"], strict=True))
        for b in batches(source, 2, augmentation=Augmentation((0.2, 0.5)))
    ]
    assert any((images[0][index] != images[1][index]).any() for index in range(12))
    first, second = (dict(zip(b["index"], b["image"], strict=True)) for b in plain)
    assert all((first[index] == second[index]).all() for index in range(12))


@pytest.mark.parametrize("process_count", [1, 3])
def test_colors_depend_on_the_row_alone(process_count):
    source = MemorySource(40, captions=3)
    colors = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}
    jittered = [
        batches(source, 4, augmentation=Augmentation(**colors), process_index=p, process_count=process_count)
        for p in range(process_count)
    ]
    joined = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*jittered, strict=True)
    ]
    drawn = [batch.pop("color") for batch in joined]
    assert_equal(joined, batches(source, 4))  # the same crops
    replaced = batches(MemorySource(40, captions=1, bad=[3, 4]), 4, augmentation=Augmentation(**colors))
    np.testing.assert_array_equal(drawn, [batch["color"] for batch in replaced])
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 4 * 12


def test_training_draws_from_all_captions():
    drawn = collections.Counter(
        TOKENIZER.decode(row).split("/")[1] for b in batches(MemorySource(40, captions=4), 20) for row in b["text"]
    )
    assert drawn.keys() == set("0123") and min(drawn.values()) > 30


@pytest.mark.parametrize("stop", [0, 3, 10])
def test_resume_continues_exactly(stop):
    source = MemorySource(40, captions=3)
    reference = batches(source, 14)
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "seed": 0}
    iterator = train_iterator(source, **kwargs)
    assert_equal(list(itertools.islice(iterator, stop)), reference[:stop])
    state = json.loads(json.dumps(iterator.get_state()))
    assert_equal(list(itertools.islice(iterator, 2)), reference[stop : stop + 2])
    fresh = train_iterator(source, **kwargs)
    fresh.set_state(state)
    assert fresh.get_state() == state
    iterator.set_state(state)  # also backwards, on a running iterator
    for resumed in (fresh, iterator):
        assert_equal(list(itertools.islice(resumed, 4)), reference[stop : stop + 4])
        resumed.close()


class Rendezvous(MemorySource):
    """Source that waits at its first record until `readers` processes have come."""

    def __init__(self, size, folder, readers, captions):
        super().__init__(size, captions)
        self.folder, self.readers = folder, readers

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 100
        while len(list(self.folder.iterdir())) < self.readers:
            assert time.monotonic() < deadline, "the other workers have not started"
            time.sleep(0.01)
        return super().__getitem__(index)


def test_workers_start_together_give_the_same_batches_and_resume_either_way(tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 130, "seed": 1}
    threads = train_iterator(MemorySource(270, captions=3), augmentation=Augmentation(shift=2), **kwargs)
    reference = list(itertools.islice(threads, 5))
    source = Rendezvous(270, tmp_path, readers=2, captions=3)
    workers = train_iterator(source, augmentation=Augmentation(shift=2), num_workers=2, **kwargs)
    workers.set_state({**threads.get_state(), "next_batch": 1})  # in the middle of the first epoch, of two batches
    assert_equal(list(itertools.islice(workers, 3)), reference[1:4])
    assert workers.stats()[parallelism.seconds_name(parallelism.READ)] > 0
    threads.set_state(workers.get_state())
    assert_equal([next(threads)], reference[4:])
    for iterator in (threads, workers):
        iterator.close()


def test_state_goes_through_an_orbax_handler(tmp_path):
    source = MemorySource(40)
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "seed": 0}
    iterator, restored = train_iterator(source, **kwargs), train_iterator(source, **kwargs)
    list(itertools.islice(iterator, 5))
    handler = grain.checkpoint.CheckpointHandler()
    handler.save(tmp_path, iterator)
    handler.restore(tmp_path, restored)
    assert_equal(list(itertools.islice(iterator, 2)), list(itertools.islice(restored, 2)))
    iterator.close()
    restored.close()


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 6}, {"source": MemorySource(41)}])
def test_state_of_other_data_is_refused(change):
    kwargs = {"source": MemorySource(40), "tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "seed": 0}
    state = train_iterator(**kwargs).get_state()
    with pytest.raises(ValueError, match=r"saved with (seed=0|batch_size=12|num_examples=40), this run has (1|6|41);"):
        train_iterator(**(kwargs | change)).set_state(state)


def test_open_iterator_does_not_disturb_the_end_of_a_program():
    code = """
from infcl_jax.data import ByteTokenizer, load_source, train_iterator
if __name__ == "__main__":
    source = load_source("digits", "train")
    iterator = train_iterator(source, tokenizer=ByteTokenizer(), image_size=32, batch_size=8, seed=0)
    next(iterator)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


def test_closed_iterator_stops():
    iterator = train_iterator(MemorySource(40), tokenizer=TOKENIZER, image_size=8, batch_size=12, seed=0)
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@pytest.mark.parametrize(
    "change,match",
    [
        ({"batch_size": 10, "process_count": 3}, "batch_size must be a multiple of the 3 processes, got 10"),
        ({"batch_size": 41}, "batch_size must be at most the 40 examples of memory, split train, got 41"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"process_index": 1}, r"process_index must be in \[0, 1\), got 1"),
        ({"seed": -1}, "seed"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"prefetch_batches": 0}, "prefetch_batches must be at least 1"),
        ({"cores": 0}, "cores must be at least 1"),
        ({"processes_per_host": 0}, "processes_per_host must be at least 1"),
        ({"image_size": 0}, "image_size must be at least 1"),
    ],
)
def test_bad_arguments(change, match):
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "seed": 0}
    with pytest.raises(ValueError, match=match):
        train_iterator(MemorySource(40), **(kwargs | change))


def test_bad_records_are_replaced_by_the_next_good_one(caplog):
    good, broken = MemorySource(40), MemorySource(40, bad=[7, 8, 39])
    replacement = {7: 9, 8: 9, 39: 0}
    with caplog.at_level(logging.WARNING):
        found = indices(batches(broken, 9))
    assert found == [[replacement.get(index, index) for index in batch] for batch in indices(batches(good, 9))]
    warnings = [record.getMessage() for record in caplog.records]
    assert sorted(warnings) == [
        f"bad record {i} of memory, split train; replaced by the next record" for i in (39, 7, 8)
    ]


@pytest.mark.parametrize("bad,limit", [([3], 0), (range(10, 14), 3), (range(40), 100)])
def test_too_many_bad_records_stop_the_run(bad, limit):
    with pytest.raises(BadRecordError, match=r"bad record .* of memory, split train; .*bad"):
        batches(MemorySource(40, bad=bad), 6, max_bad_records=limit)


@pytest.mark.parametrize(
    ("limit", "samples", "count"),
    [
        (None, 500, 100),
        (None, 10**6, 10**4),
        (0, 500, 0),
        (1, 500, 1),
        (200.0, 64, 200),
        (0.05, 64, 3),
        (0.29, 100, 29),
    ],
)
def test_the_limit_of_bad_records_is_a_number_or_a_fraction(limit, samples, count):
    assert bad_record_limit(limit, range(samples)) == count


@pytest.mark.parametrize(
    ("limit", "samples", "match"),
    [
        (0.1, 40, "4 bad records that max_bad_records=0.1 allows"),
        (None, 204, r"100 bad records that max_bad_records=None \(1 % of the samples, at least 100\) allows, check"),
    ],
)
def test_the_message_has_the_limit_and_the_setting(limit, samples, match):
    records = BadRecords(MemorySource(samples), limit)
    with pytest.raises(BadRecordError, match=f"more than the {match}"):
        records.add(range(0, samples, 2))


@pytest.mark.parametrize(("size", "process_count"), [(1, 3), (12, 1), (13, 3), (40, 1), (40, 3)])
def test_evaluation_covers_the_split_once_in_order(size, process_count):
    source = MemorySource(size, captions=3, ragged=True)
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "process_count": process_count}
    parts = [list(eval_batches(source, process_index=p, **kwargs)) for p in range(process_count)]
    assert {len(part) for part in parts} == {-(-size // 12)} == {len(eval_batches(source, **kwargs))}
    rows = 12 // process_count
    shapes = {
        (key, value.shape[key.startswith("text") :], value.dtype.name)
        for part in parts
        for batch in part
        for key, value in batch.items()
    }
    assert shapes == {
        ("image", (rows, 8, 8, 3), "uint8"),
        ("text", (16,), "int32"),
        ("text_index", (), "int64"),
        ("index", (rows,), "int64"),
        ("label", (rows,), "int32"),
        ("mask", (rows,), "bool"),
    }
    joined = {key: np.concatenate([b[key] for step in zip(*parts, strict=True) for b in step]) for key in parts[0][0]}
    mask = joined["mask"]
    assert joined["index"][mask].tolist() == list(range(size)) and not mask[size:].any()
    assert joined["label"][mask].tolist() == [index % 5 for index in range(size)]
    captions = [(index, caption) for index in range(size) for caption in source[index]["captions"]]
    assert [*zip(joined["text_index"], map(TOKENIZER.decode, joined["text"]), strict=True)] == captions
    assert (joined["index"][~mask] == -1).all() and (joined["label"][~mask] == -1).all()
    assert not joined["image"][~mask].any()


@pytest.mark.parametrize("process_count", [1, 3])
def test_bad_records_become_padding(process_count):
    bad = (0, 7, 25, 39)
    sources = [MemorySource(40, bad=bad), MemorySource(40)]
    kwargs = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 12, "process_count": process_count}
    for process in range(process_count):
        damaged, good = (
            list(eval_batches(source, process_index=process, skip_bad=True, **kwargs)) for source in sources
        )
        for batch, whole in zip(damaged, good, strict=True):
            kept = whole["mask"] & ~np.isin(whole["index"], bad)
            np.testing.assert_array_equal(batch["mask"], kept)
            np.testing.assert_array_equal(batch["image"][kept], whole["image"][kept])
            assert (batch["index"][~kept] == -1).all() and not np.isin(batch["text_index"], bad).any()
            expected = whole["index"][whole["mask"] & ~kept]
            assert batch["bad_records"]["index"].tolist() == expected.tolist() and not len(whole["bad_records"])


def test_first_batches_images_and_captions_can_be_left_out():
    whole = list(eval_batches(MemorySource(40), tokenizer=TOKENIZER, image_size=8, batch_size=12))
    for tokenizer, image_size, left_out in ((TOKENIZER, None, {"image"}), (None, 8, {"text", "text_index"})):
        rest = eval_batches(MemorySource(40), tokenizer=tokenizer, image_size=image_size, batch_size=12, first_batch=2)
        assert len(rest) == 2
        assert_equal(list(rest), [{k: v for k, v in batch.items() if k not in left_out} for batch in whole[2:]])


def test_evaluation_can_be_iterated_again_and_left_early():
    loader = eval_batches(MemorySource(40), tokenizer=TOKENIZER, image_size=8, batch_size=12)
    next(iter(loader))
    assert_equal(list(loader), list(loader))


def test_evaluation_raises_at_a_bad_record():
    loader = eval_batches(MemorySource(40, bad=[25]), tokenizer=TOKENIZER, image_size=8, batch_size=12)
    for _ in range(2):
        with pytest.raises(BadRecordError, match="bad record 25 of memory, split train"):
            list(loader)


def test_seconds_of_all_stages_reach_the_statistics(monkeypatch):
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", 4)
    iterator = train_iterator(MemorySource(40), tokenizer=TOKENIZER, image_size=8, batch_size=12, seed=0)
    next(iterator)
    stats = iterator.stats()
    iterator.close()
    assert all(stats[parallelism.seconds_name(stage)] > 0 for stage in parallelism.STAGES[:4])


def test_training_without_captions_is_refused():
    class Uncaptioned(MemorySource):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"caption": "", "captions": ()}

    with pytest.raises(ValueError, match="expected captions to train on"):
        batches(Uncaptioned(40), 1)
