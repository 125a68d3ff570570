"""Checks of a few records before a run starts."""

import pytest

from infcl_jax.data import BadRecordError
from infcl_jax.evaluation.scoring import check_labels, check_records


class Labels:
    """Source of labels that counts reads; None is a bad record."""

    name, split = "labels", "test"

    def __init__(self, labels):
        self.labels, self.reads = labels, 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.reads += 1
        if self.labels[index] is None:
            raise BadRecordError(f"bad record {index}")
        return {"label": self.labels[index]}


@pytest.mark.parametrize("labels", [[0], [None, 0], [None] * 999 + [0], [0] * 10**6])
def test_a_split_with_a_readable_record_is_accepted_after_a_few_reads(labels):
    source = Labels(labels)
    check_records(source)
    assert source.reads <= 16


@pytest.mark.parametrize(
    ("labels", "message"),
    [([], "^expected records in labels, split test, got none$"), ([None] * 40, "^bad record 0; the 16 records tried")],
)
def test_a_split_without_a_readable_record_is_named(labels, message):
    with pytest.raises(ValueError, match=message):
        check_records(Labels(labels))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2], "expected at least 3 class names for a, got 2: record 2 of labels, split test has the label 2"),
        ([None, 5], "at least 6 class names for a, got 2: record 1"),
        ([-1] * 100, "expected labels in labels, split test, for a, got none"),
        ([-1] * 50 + [7] + [-1] * 49, "at least 8 class names"),
    ],
)
def test_labels_without_class_names_are_named(labels, message):
    with pytest.raises(ValueError, match=message):
        check_labels(Labels(labels), 2, "a")


def test_all_labels_are_read_only_if_the_dataset_names_more_classes(monkeypatch):
    labels = [0] * 500 + [2] + [1] * 499
    source = Labels(labels)
    check_labels(source, 2, "a")
    assert source.reads <= 16
    monkeypatch.setattr("infcl_jax.evaluation.scoring.own_class_count", lambda source: 3)
    with pytest.raises(ValueError, match=r"record 500 .* has the label 2"):
        check_labels(source, 2, "a")
    check_labels(Labels([0, 1] * 500), 2, "a")  # a split with a part of the classes
