"""The records of a resumed run, wherever they are."""

import logging

import numpy as np
import pytest

from infcl_jax.data.dataset_identity import check_same_data, dataset_identity, same_place
from infcl_jax.data.sources.base import BadRecordError
from infcl_jax.data.sources.text_retrieval import RetrievalExample


class Samples:
    split = "train"

    def __init__(self, name, size=40, changed=None, bad=None):
        self.name, self.size, self.changed, self.bad = name, size, changed, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.bad:
            raise BadRecordError(f"bad record {index} of {self.name}")
        return {"image": np.full((2, 2, 3), index, np.uint8), "captions": [f"{index} {index == self.changed}"]}


class Queries(Samples):
    def __getitem__(self, index):
        return RetrievalExample(f"query {index} {index == self.changed}", (), ())


OLD = {"num_examples": 40}  # position of a version that saved no records


@pytest.mark.parametrize("kind", [Samples, Queries])
@pytest.mark.parametrize(("new", "allowed"), [({}, True), ({"changed": 39}, False), ({"size": 41}, False)])
def test_moved_data_must_have_the_same_records(kind, new, allowed, caplog):
    saved, identity = dataset_identity(kind("a.tar", bad=0)), dataset_identity(kind("b.tar", bad=0, **new))
    if allowed:
        assert check_same_data(saved, identity, "run", forked=False) is False and not caplog.records
        return
    with pytest.raises(ValueError, match=r"^expected [^\n]*with which the run in run was trained, got [^\n]*; [^\n]*$"):
        check_same_data(saved, identity, "run", forked=False)


@pytest.mark.parametrize("saved", [OLD, dataset_identity(Samples("a.tar"))])
def test_another_size_is_allowed_from_another_run_alone(saved, caplog):
    grown = dataset_identity(Samples("a.tar", size=64))
    match = r"expected 40 samples, .* got 64 in a.tar, .* another version leaves out .* --config.resume=run"
    with pytest.raises(ValueError, match=match):
        check_same_data(saved, grown, "run", forked=False)
    assert check_same_data(saved, grown, "run", forked=True) is True
    assert [r.getMessage() for r in caplog.records] == [
        "a.tar, split train has 64 samples, 40 in the run in run; continues in a new order"
    ]


def test_another_size_is_refused_with_a_state_of_each_sample():
    with pytest.raises(ValueError, match=r"expected the 40 samples whose state .* got 64 .* --config.init.model=run"):
        check_same_data(OLD, dataset_identity(Samples("a.tar", size=64)), "run", forked=True, indexed=True)


def test_moved_data_of_an_old_checkpoint_cannot_be_compared():
    with pytest.raises(ValueError, match=r"has no records to compare with, got b.tar, .* with the old path"):
        check_same_data(OLD, dataset_identity(Samples("b.tar")), "run", forked=False, moved=True)


@pytest.mark.parametrize("other", ["data/", "./data", "sub/../data", "link"])
def test_paths_of_the_same_files_are_the_same_place(other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "sub", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("data")
    assert same_place("data", other) and same_place(str(tmp_path / "data"), other) and not same_place("other", other)


def test_data_in_its_place_is_taken_as_it_is(caplog):
    assert check_same_data(OLD, dataset_identity(Samples("a.tar")), "run", forked=False) is False
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        saved = dataset_identity(Samples("a.tar"))
        assert check_same_data(saved, dataset_identity(Samples("a.tar", changed=0)), "run", forked=False) is False
    assert [record.getMessage() for record in caplog.records] == [
        "records of a.tar, split train have changed since the run in run was trained"
    ]
