import collections
import json
import pickle

import captioned
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources.base import describe, source_name
from infcl_jax.data.sources.mixture import interleave


@pytest.fixture
def folder(tmp_path):
    for name, count, start in (("a", 10, 0), ("b", 4, 100), ("c", 7, 200)):
        captioned.write_tar(tmp_path / f"{name}.tar", captioned.members(captioned.samples(count, start)))
    return tmp_path


def write(folder, entries):
    (folder / "mixture.json").write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(folder / "mixture.json")


def load(folder, entries, split="train"):
    return load_source(write(folder, entries), split)


THREE = [
    {"path": "a.tar", "weight": 1},
    {"path": "b.tar", "weight": 0.5},
    {"path": "c.tar", "weight": 2, "max_samples": 5},
]


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1, 2], [1, 999], [1000003, 7, 500000, 1]])
def test_interleaving_follows_the_weights(weights):
    counts = [0] * len(weights)
    for row in range(3000):
        component, local = interleave(row, weights)
        assert local == counts[component]
        counts[component] += 1
        shares = np.array(weights) * (row + 1) / sum(weights)
        assert np.abs(np.array(counts) - shares).max() < len(weights)


def test_samples_are_those_of_the_components_in_order(folder):
    source = load(folder, THREE)
    assert len(source) == 19 and source.names == ("a.tar", "b.tar", "c.tar")
    expected = [*range(10), *range(100, 104), *range(200, 205)]
    assert [source[i]["caption"] for i in range(19)] == [f"caption {i}" for i in expected]
    assert [source_name(source, i) for i in (0, 9, 10, 14)] == ["a.tar", "a.tar", "b.tar", "c.tar"]
    assert "record 2 of" in describe(source, 12) and "(b.tar, key 000102)" in describe(source, 12)
    assert pickle.loads(pickle.dumps(source))[12] == source[12]
    for index in (-1, 19):
        with pytest.raises(IndexError):
            source[index]


def test_each_part_has_its_own_epochs(folder):
    source = load(folder, THREE)
    rows, again, other = ([source.order(seed)[row] for row in range(size)] for seed, size in ((3, 140), (3, 9), (4, 9)))
    assert rows[:9] == again != other
    drawn = collections.defaultdict(list)
    for index in rows:
        drawn[source.names.index(source.source_name(index))].append(source.locate(index)[1])
    assert [len(drawn[component]) for component in range(3)] == [40, 20, 80]
    for component, size in enumerate((10, 4, 5)):
        epochs = np.array(drawn[component]).reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len(np.unique(epochs, axis=0)) > 1


def test_without_weights_the_rates_are_the_sizes(folder):
    source = load(folder, [{"path": "a.tar"}, {"path": "b.tar"}])
    assert sorted(source.order(0)[row] for row in range(14)) == list(range(14))


def test_components_with_splits_names_and_other_kinds(folder):
    captioned.write_folder(folder / "photos", captioned.samples(3, 300))
    entries = [
        {"path": "a.tar", "split": "train[5:]", "name": "late"},
        {"path": "a.tar", "split": "train[:5]", "name": "early"},
        {"path": "photos"},
        {"path": "digits"},
    ]
    source = load(folder, entries)
    assert source.names == ("late", "early", "photos", "digits")
    assert [source[i]["caption"] for i in (0, 5, 10)] == ["caption 5", "caption 0", "caption 300"]
    assert source[13]["label"] >= 0


def test_bounds_would_lose_the_weights(folder):
    with pytest.raises(ValueError, match=r"expected a split without bounds for .*mixture\.json"):
        load(folder, THREE, "train[2:6]")


def test_fingerprint_changes_with_the_order(folder):
    first = load(folder, THREE).fingerprint()
    assert first == load(folder, THREE).fingerprint()
    assert first != load(folder, [*THREE[:2], {**THREE[2], "weight": 3}]).fingerprint()


def test_dropped_samples_are_counted_by_component(folder):
    captioned.write_tar(folder / "b.tar", captioned.members([*captioned.samples(2), ("x", {"jpg": b"image"})]))
    captioned.write_csv(folder / "d.csv", [("a.tar", "a"), ("b.jpg", ""), ("", "c")])
    source = load(folder, [{"path": "a.tar"}, {"path": "b.tar", "max_samples": 1}, {"path": "d.csv"}])
    assert source.dropped == {"no caption (b.tar)": 1, "no image (d.csv)": 1, "no caption (d.csv)": 1}


def test_bad_records_name_their_component(folder):
    captioned.write_tar(folder / "b.tar", captioned.members([("x", {"jpg": b"x", "txt": b"\xff"})]))
    source = load(folder, THREE)
    with pytest.raises(BadRecordError, match=r"bad record 0 of .*/b\.tar, split train \(b\.tar, key x\)"):
        source[10]


@pytest.mark.parametrize(
    "entries,match",
    [
        ("[", "expected JSON in .*mixture.json, got Expecting"),
        ("[" * 100000, "expected JSON in .*mixture.json, got one that is nested too deeply"),
        ([], r'mixture.json: expected a list of \{"path": \.\.\., "weight": \.\.\.\}, got \[\]'),
        ({"path": "a.tar"}, "mixture.json: expected a list"),
        ([3], 'mixture.json, component 0: expected an object with a "path", got 3'),
        ([{"path": "a.tar"}, {"paths": "b.tar"}], 'component 1: expected an object with a "path"'),
        (
            [{"path": "a.tar", "rate": 2}],
            "component 0: expected the keys path, weight, max_samples, split, name, got rate",
        ),
        ([{"path": "a.tar", "weight": 0}], "component 0: expected a weight of at least 1e-6, got 0"),
        ([{"path": "a.tar", "weight": "2"}], "component 0: expected a weight of at least 1e-6, got '2'"),
        ([{"path": "a.tar", "split": 3}], "component 0: expected a text for 'split', got 3"),
        ([{"path": "a.tar", "max_samples": 0}], "component 0: expected max_samples >= 1, got 0"),
        ([{"path": "a.tar", "weight": 1}, {"path": "b.tar"}], "expected a weight for every component or for none"),
        ([{"path": "a.tar"}, {"path": "a.tar"}], "expected different names, got 'a.tar' twice"),
        ([{"path": "mixture.json"}], "component 0: expected a dataset that is no mixture, got mixture.json"),
        ([{"path": "nonsense"}], "component 0: dataset must be one of"),
    ],
)
def test_mistakes(folder, entries, match):
    with pytest.raises(ValueError, match=match) as error:
        load(folder, entries)
    assert "\n" not in str(error.value)


def test_missing_files(folder):
    with pytest.raises(
        FileNotFoundError, match=r"mixture\.json, component 1: 1 of the 1 shards of .*/z\.tar do not exist"
    ):
        load(folder, [{"path": "a.tar"}, {"path": "z.tar"}])
    with pytest.raises(FileNotFoundError, match=r"nothing\.json does not exist; check the path"):
        load_source(str(folder / "nothing.json"), "train")
