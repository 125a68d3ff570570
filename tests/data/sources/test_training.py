import collections
import itertools
import json
import logging

import captioned
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, ByteTokenizer, eval_batches, load_source, train_iterator

pytestmark = pytest.mark.runs

TOKENIZER = ByteTokenizer(context_length=24)
DAMAGED = (17, 61, 62, 340, 499)  # 1 % of the samples
REPLACED = {18: 1, 63: 2, 341: 1, 0: 1}  # by how many damaged ones each sample is read once more


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two tars with two captions a sample, and their mixture."""
    folder = tmp_path_factory.mktemp("data")
    for name, count, start in (("a", 30, 0), ("b", 20, 30)):
        samples = captioned.samples(count, start)
        for i, (_, readers) in enumerate(samples, start):
            readers["json"] = json.dumps({"captions": [f"caption {i}", f"other {i}"]}).encode()
            del readers["txt"]
        captioned.write_tar(folder / f"{name}.tar", captioned.members(samples))
    entries = [{"path": "a.tar", "weight": 3}, {"path": "b.tar", "weight": 1, "max_samples": 12}]
    (folder / "mixture.json").write_text(json.dumps(entries))
    return folder


def iterators(source, processes, **kwargs):
    options = {"tokenizer": TOKENIZER, "image_size": 8, "batch_size": 8, "seed": 5, **kwargs}
    return [train_iterator(source, process_index=i, process_count=processes, **options) for i in range(processes)]


def global_batches(iterators, count):
    """Batches of all processes, concatenated."""
    readers = [list(itertools.islice(iterator, count)) for iterator in iterators]
    return [
        {key: np.concatenate([reader[key] for reader in step]) for key in step[0]}
        for step in zip(*readers, strict=True)
    ]


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def close(iterators):
    for iterator in iterators:
        iterator.close()


def test_training_follows_the_order_of_a_mixture(data):
    source = load_source(str(data / "mixture.json"), "train")
    (iterator,) = iterators(source, 1)
    rows = np.concatenate([batch["index"] for batch in itertools.islice(iterator, 12)])
    iterator.close()
    order = source.order(seed=5)
    assert rows.tolist() == [order[row] for row in range(96)]


def test_state_of_another_mixture_is_refused(data, tmp_path):
    state = iterators(load_source(str(data / "mixture.json"), "train"), 1)[0].get_state()
    entries = [{"path": f"{data}/a.tar", "weight": 1}, {"path": f"{data}/b.tar", "weight": 1, "max_samples": 12}]
    (tmp_path / "mixture.json").write_text(json.dumps(entries))
    other = iterators(load_source(str(tmp_path / "mixture.json"), "train"), 1)[0]
    with pytest.raises(ValueError, match="the data state was saved with order="):
        other.set_state(state)


def test_evaluation_has_all_captions(data):
    source = load_source(str(data / "{a,b}.tar"), "train")
    batches = list(eval_batches(source, tokenizer=TOKENIZER, image_size=8, batch_size=25))
    expected = [f"{word} {i}" for i in range(50) for word in ("caption", "other")]
    assert [TOKENIZER.decode(row) for b in batches for row in b["text"]] == expected
    assert source[3]["captions"] == ("caption 3", "other 3")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Two tars of 500 samples in all, 1 % of them damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    samples = captioned.samples(500)
    for index in DAMAGED:
        samples[index][1]["jpg"] = samples[index][1]["jpg"][: 20 + index % 200]
    for name, span in (("a", slice(0, 250)), ("b", slice(250, 500))):
        captioned.write_tar(folder / f"{name}.tar", captioned.members(samples[span]))
    (folder / "mixture.json").write_text('[{"path": "a.tar", "name": "first"}, {"path": "b.tar", "name": "second"}]')
    return folder


COUNTS = {"mixture.json": {"first": 3, "second": 2}, "{a,b}.tar": {None: 5}}  # None: the name of the source


@pytest.mark.parametrize("name", COUNTS)
def test_damaged_members_are_counted_and_all_others_seen_once_an_epoch(damaged, name, caplog):
    source = load_source(str(damaged / name), "train")
    (iterator,) = iterators(source, 1, batch_size=50)
    counts = []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            epoch = np.concatenate([batch["index"] for batch in itertools.islice(iterator, 10)])
            expected = {i: 1 + REPLACED.get(i, 0) for i in range(500) if i not in DAMAGED}
            assert collections.Counter(epoch.tolist()) == expected
            counts.append(iterator.bad_records.counts())
    iterator.close()
    assert counts == [{label or source.name: count for label, count in COUNTS[name].items()}] * 2
    assert iterator.bad_records.indices() == list(DAMAGED)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 5 and all("replaced by the next record" in text for text in warnings)
    assert sum("(a.tar, key 0000" in text for text in warnings) == 3


def test_resume_with_more_processes_keeps_the_order_and_the_counts(damaged):
    source = load_source(str(damaged / "mixture.json"), "train")
    (whole,) = iterators(source, 1, batch_size=20)
    expected = global_batches([whole], 30)  # more than an epoch
    result, state = [], None
    for processes in (1, 2, 4):
        readers = iterators(source, processes, batch_size=20)
        for iterator in readers:
            if state is not None:
                iterator.set_state(state)
        result += global_batches(readers, 10)
        for index in [iterator.bad_records.indices() for iterator in readers[1:]]:
            readers[0].bad_records.add(index)  # as `infcl_jax.distributed.union` exchanges them
        state = json.loads(json.dumps(readers[0].get_state()))
        close(readers)
    assert_equal(result, expected)
    assert state == whole.get_state() and state["bad_records"] == list(DAMAGED)
    close([whole])


def test_workers_share_the_limit_of_damaged_members(damaged):
    """No worker alone reads more than 4 of them."""
    source = load_source(str(damaged / "mixture.json"), "train")
    (iterator,) = iterators(source, 1, batch_size=250, max_bad_records=4, num_workers=2)
    with pytest.raises(
        BadRecordError,
        match=r"bad record .* more than the 4 bad records that max_bad_records=4 allows, check the data \(replaced bad "
        r"records: \d of first, \d of second\)",
    ):
        list(itertools.islice(iterator, 2))
    iterator.close()


def test_replay_counts_each_damaged_member_once(damaged):
    (iterator,) = iterators(load_source(str(damaged / "mixture.json"), "train"), 1, batch_size=500)
    reader = iterator.next_reader()
    batches = [reader.read([slice(0, 500)]) for _ in range(2)]
    assert_equal(batches[:1], batches[1:])
    assert iterator.bad_records.counts() == {"first": 3, "second": 2}
    iterator.close()


def test_evaluation_names_the_damaged_member(damaged):
    source = load_source(str(damaged / "{a,b}.tar"), "train")
    with pytest.raises(BadRecordError, match=r"bad record 17 of .*, split train \(a\.tar, key 000017\): OSError"):
        list(eval_batches(source, tokenizer=TOKENIZER, image_size=8, batch_size=200))
