import collections
import itertools
import json
import logging

import captioned
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, ByteTokenizer, eval_batches, load_source, train_iterator

TOKENIZER = ByteTokenizer(context_length=24)
DAMAGED = (17, 61, 62, 140, 199)


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


def close(iterators):
    for iterator in iterators:
        iterator.close()


@pytest.mark.parametrize("name", ["{a,b}.tar", "mixture.json"])
def test_resume_with_more_processes_continues_the_global_order(data, name):
    source = load_source(str(data / name), "train")
    whole = iterators(source, 1)
    expected = global_batches(whole, 15)  # several epochs
    close(whole)
    result, state = [], None
    for processes in (1, 2, 4):
        readers = iterators(source, processes)
        for iterator in readers:
            if state is not None:
                iterator.set_state(state)
        result += global_batches(readers, 5)
        state = json.loads(json.dumps(readers[0].get_state()))
        close(readers)
    for first, second in zip(result, expected, strict=True):
        for key in first:
            np.testing.assert_array_equal(first[key], second[key])


def test_training_follows_the_order_of_a_mixture(data):
    source = load_source(str(data / "mixture.json"), "train")
    (iterator,) = iterators(source, 1)
    rows = np.concatenate([batch["index"] for batch in itertools.islice(iterator, 12)])
    iterator.close()
    order = source.order(seed=5)
    assert rows.tolist() == [order[row] for row in range(96)]


def test_workers_read_tars_and_mixtures(data):
    source = load_source(str(data / "mixture.json"), "train")
    threads, workers = iterators(source, 1), iterators(source, 1, num_workers=1)
    for first, second in zip(global_batches(threads, 3), global_batches(workers, 3), strict=True):
        np.testing.assert_array_equal(first["image"], second["image"])
        np.testing.assert_array_equal(first["text"], second["text"])
    close(threads + workers)


def test_state_of_another_mixture_is_refused(data, tmp_path):
    state = iterators(load_source(str(data / "mixture.json"), "train"), 1)[0].get_state()
    entries = [{"path": f"{data}/a.tar", "weight": 1}, {"path": f"{data}/b.tar", "weight": 1, "max_samples": 12}]
    (tmp_path / "mixture.json").write_text(json.dumps(entries))
    other = iterators(load_source(str(tmp_path / "mixture.json"), "train"), 1)[0]
    with pytest.raises(ValueError, match="the data state was saved with order="):
        other.set_state(state)


def test_training_draws_from_all_captions_and_evaluation_has_all_of_them(data):
    source = load_source(str(data / "{a,b}.tar"), "train")
    readers = iterators(source, 1)
    texts = [TOKENIZER.decode(row) for batch in global_batches(readers, 18) for row in batch["text"]]
    close(readers)
    assert {text.split()[0] for text in texts} == {"caption", "other"}
    batches = list(eval_batches(source, tokenizer=TOKENIZER, image_size=8, batch_size=25))
    expected = [f"{word} {i}" for i in range(50) for word in ("caption", "other")]
    assert [TOKENIZER.decode(row) for b in batches for row in b["text"]] == expected
    assert source[3]["captions"] == ("caption 3", "other 3")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Two tars of 200 samples, a few of them damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    samples = captioned.samples(200)
    for index in DAMAGED:
        samples[index][1]["jpg"] = samples[index][1]["jpg"][: index + 20]
    for name, span in (("a", slice(0, 100)), ("b", slice(100, 200))):
        captioned.write_tar(folder / f"{name}.tar", captioned.members(samples[span]))
    (folder / "mixture.json").write_text('[{"path": "a.tar", "name": "first"}, {"path": "b.tar", "name": "second"}]')
    return folder


@pytest.mark.parametrize("name", ["{a,b}.tar", "mixture.json"])
def test_damaged_members_are_counted_and_all_others_seen_once_an_epoch(damaged, name, caplog):
    source = load_source(str(damaged / name), "train")
    (iterator,) = iterators(source, 1, batch_size=20)
    with caplog.at_level(logging.WARNING):
        epoch = np.concatenate([batch["index"] for batch in itertools.islice(iterator, 10)])
    iterator.close()
    counts = collections.Counter(epoch.tolist())
    replacements = {18: 1, 63: 2, 141: 1, 0: 1}
    assert counts == {i: 1 + replacements.get(i, 0) for i in range(200) if i not in DAMAGED}
    expected = {"first": 3, "second": 2} if name == "mixture.json" else {source.name: 5}
    assert iterator.bad_records() == expected
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 5 and all("replaced by the next record" in text for text in warnings)
    assert sum("(a.tar, key 0000" in text for text in warnings) == 3


def test_too_many_damaged_members_stop_the_run_and_are_counted_by_source(damaged):
    source = load_source(str(damaged / "mixture.json"), "train")
    (iterator,) = iterators(source, 1, batch_size=20, max_bad_records=4, num_threads=1)
    with pytest.raises(
        BadRecordError, match=r"more bad records than the 4 allowed, check the data \(before it: \d of "
    ):
        list(itertools.islice(iterator, 10))
    iterator.close()


def test_evaluation_names_the_damaged_member(damaged):
    source = load_source(str(damaged / "{a,b}.tar"), "train")
    with pytest.raises(BadRecordError, match=r"bad record 17 of .*, split train \(a\.tar, key 000017\): OSError"):
        list(eval_batches(source, tokenizer=TOKENIZER, image_size=8, batch_size=200))
