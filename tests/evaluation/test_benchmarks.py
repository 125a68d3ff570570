"""The suite on benchmarks: numbers, shared encoding, averages, examples and progress."""

import collections

import benchmark_layout as layout
import captioned
import jax
import numpy as np
import oracle
import pytest
import runs

from infcl_jax.data import BadRecordError, ByteTokenizer
from infcl_jax.data.decode import decode
from infcl_jax.data.transforms import resize_center_crop
from infcl_jax.evaluation import EvaluationConfig, Suite, flat_metrics, suite
from infcl_jax.evaluation.suites import SUITES
from infcl_jax.runtime.mesh import replicate

IMAGES = 21  # a remainder on 8 devices, and in batches of 16
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 5, IMAGES)  # class 5 has no images
GROUPS = RNG.integers(3, 6, (IMAGES, 2))  # group 5 does not count in FMoW
TARGETS = RNG.random((IMAGES, 6)) < 0.3
CAPTIONS = [tuple(f"text {chr(97 + i)} {j}" for j in range(1 + i % 3)) for i in range(IMAGES)]
NAMES = ("wilds/fmow", "wilds/iwildcam", "multi", "retrieval")
TOKENIZER = ByteTokenizer(runs.CONTEXT)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    classified = layout.classified(LABELS, GROUPS)
    layout.write_benchmark(folder / "wds_wilds-fmow_test", classified, shards=1)
    layout.write_benchmark(folder / "wds_wilds-iwildcam_test", classified, shards=1)
    layout.write_benchmark(folder / "wds_multi", layout.classified(LABELS, TARGETS), kind="multilabel", shards=1)
    texts = [{"txt": "\n".join(texts).encode(), "jpg": captioned.jpeg(i)} for i, texts in enumerate(CAPTIONS)]
    layout.write_benchmark(folder / "wds_flickr30k", texts, kind="retrieval", shards=1)
    return folder


@pytest.fixture(scope="module")
def params():
    arrays = (runs.batch(1)["image"], runs.batch(1)["text"])
    return jax.device_get(jax.jit(runs.Linear().init)(jax.random.key(0), *arrays)["params"])


def make_suite(benchmarks, devices, evaluations, **options):
    config = EvaluationConfig(batch_size=16, data_dir=str(benchmarks))
    mesh = oracle.mesh_of(devices)
    arguments = {"image_size": runs.SIDE, "data_dir": "nowhere", "mesh": mesh, "evaluations": evaluations}
    return Suite(config, runs.Linear(), TOKENIZER, **arguments, **options), mesh


@pytest.fixture(scope="module")
def expected(params):
    """Similarities in NumPy: images with classes, images with captions."""
    model = runs.Linear()

    def encode(name, inputs):
        features = jax.jit(lambda x: model.apply({"params": params}, x, method=f"encode_{name}"))(inputs)
        return np.asarray(features, np.float64)

    image = encode("image", np.stack([resize_center_crop(decode(captioned.jpeg(i)), runs.SIDE) for i in range(IMAGES)]))
    prompts = [template.replace("{c}", name) for name in layout.NAMES for template in layout.TEMPLATES]
    classes = oracle.unit(encode("text", TOKENIZER(prompts)).reshape(6, 2, -1).mean(axis=1))
    text = encode("text", TOKENIZER([text for texts in CAPTIONS for text in texts]))
    return image @ classes.T, image @ text.T


def test_all_metrics_equal_numpy(benchmarks, params, expected):
    evaluate, mesh = make_suite(benchmarks, 8, NAMES)
    found = evaluate(replicate(mesh, {"params": params}))
    classes, texts = expected
    hits = classes.argmax(axis=1) == LABELS
    top5 = (classes.argsort(axis=1)[:, -5:] == LABELS[:, None]).any(axis=1)
    owner = np.repeat(np.arange(IMAGES), [len(texts) for texts in CAPTIONS])
    used = np.unique(LABELS)
    support, predicted = (np.bincount(x, minlength=6)[used] for x in (LABELS, classes.argmax(axis=1)))
    assert found["wilds/fmow/top1"] == found["wilds/iwildcam/top1"] == pytest.approx(hits.mean())
    assert found["wilds/fmow/top5"] == pytest.approx(top5.mean())
    recall = np.mean([hits[label == LABELS].mean() for label in used])
    assert found["wilds/fmow/mean_per_class_recall"] == pytest.approx(recall)
    worst = min(hits[GROUPS[:, 0] == group].mean() for group in (3, 4))
    assert found["wilds/fmow/worst_group_top1"] == pytest.approx(worst)
    f1 = np.mean(2 * np.bincount(LABELS[hits], minlength=6)[used] / (support + predicted))
    assert found["wilds/iwildcam/macro_f1"] == pytest.approx(f1)
    first = {
        "image_to_text": (owner[texts.argmax(axis=1)] == np.arange(IMAGES)).mean(),
        "text_to_image": (texts.argmax(axis=0) == owner).mean(),
    }
    for way, value in first.items():
        assert found[f"flickr30k/{way}_r1"] == pytest.approx(value)
    assert (
        found["suite/retrieval/average_of_1_of_2"]
        == found["flickr30k/mean_r1"]
        == pytest.approx(np.mean([*first.values()]))
    )
    order = np.argsort(-classes, axis=0)
    precision = [np.cumsum(t[o]) / np.arange(1, IMAGES + 1) for t, o in zip(TARGETS.T, order.T, strict=True)]
    values = [p[t[o]].mean() for p, t, o in zip(precision, TARGETS.T, order.T, strict=True)]
    assert found["multi/mean_average_precision"] == pytest.approx(np.mean(values))


def test_images_and_prompts_are_encoded_once(benchmarks, params, tmp_path, monkeypatch):
    """Two tasks on one dataset, and two datasets with the same prompts."""
    task = f"Task(name='again', dataset='{benchmarks}/wds_wilds-fmow_test')"
    (tmp_path / "again.py").write_text(f"from infcl_jax.evaluation import Task\nget_task = lambda: {task}\n")
    calls = []
    for name in ("encode_split", "prompt_ensembles"):
        original = getattr(suite, name)
        spy = lambda *args, name=name, original=original, **kwargs: calls.append(name) or original(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(suite, name, spy)
    evaluate, mesh = make_suite(benchmarks, 1, ["wilds/fmow", str(tmp_path / "again.py"), "wilds/iwildcam"])
    found = evaluate(replicate(mesh, {"params": params}))
    assert sorted(calls) == ["encode_split", "encode_split", "prompt_ensembles"]
    assert found["again/top1"] == found["wilds/fmow/top1"]


def test_a_complete_suite_has_an_average(benchmarks, params, monkeypatch):
    monkeypatch.setitem(SUITES, "retrieval", ("wilds/fmow", "wilds/iwildcam"))
    evaluate, mesh = make_suite(benchmarks, 1, ["retrieval"])
    found = evaluate(replicate(mesh, {"params": params}))
    parts = found["wilds/fmow/worst_group_top1"], found["wilds/iwildcam/macro_f1"]
    assert found["suite/retrieval/average"] == pytest.approx(np.mean(parts))


def test_examples_show_predictions(benchmarks, params, expected):
    evaluate, mesh = make_suite(benchmarks, 1, ["wilds/fmow", "flickr30k"])
    zero_shot, retrieval = evaluate.results(replicate(mesh, {"params": params}), examples=True)
    classes, texts = expected
    assert 0 < len(zero_shot.examples) <= 12 and len(retrieval.examples) == 12
    correct = [example.correct for example in zero_shot.examples]
    assert correct == sorted(correct) and not correct[0]  # mistakes first
    pixels = [resize_center_crop(decode(captioned.jpeg(i)), runs.SIDE).tobytes() for i in range(IMAGES)]
    for example in zero_shot.examples:
        row = pixels.index(example.image.tobytes())
        assert example.expected == (layout.NAMES[LABELS[row]],)
        assert example.predicted[0] == layout.NAMES[classes[row].argmax()]
        assert example.correct == (example.predicted[0] in example.expected)
    pairs = zip(LABELS, classes.argmax(axis=1), strict=True)
    wrong = collections.Counter((layout.NAMES[a], layout.NAMES[b]) for a, b in pairs if a != b)
    confusions = {(c.expected, c.predicted): c.images for c in zero_shot.confusions}
    assert confusions == dict(wrong) and list(confusions.values()) == sorted(wrong.values(), reverse=True)
    flat = [text for texts in CAPTIONS for text in texts]
    for example in retrieval.examples:
        row = pixels.index(example.image.tobytes())
        assert example.expected == CAPTIONS[row]
        assert example.predicted == tuple(flat[i] for i in np.argsort(-texts[row])[:3])
        np.testing.assert_allclose(example.similarity, np.sort(texts[row])[::-1][:3], atol=1e-5)
    assert flat_metrics([retrieval])["flickr30k/mean_r1"] == retrieval.metrics[retrieval.main_metric]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("name='validation'", "expected evaluations of different names, got 2 of the name validation"),
        ("name='a', main_metric='auc'", "expected main_metric of a to be one of .*top1.*, got 'auc'"),
        ("name='a', class_names=('a', 'b')", "expected at least 5 class names for a, got 2: record 0 of .* label 4"),
        ("name='a', kind='retrieval'", "with captions, got .*wds_wilds-fmow_test', which has only classes"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(benchmarks, params, tmp_path, fields, message):
    task = f"Task(dataset='{benchmarks}/wds_wilds-fmow_test', {fields})"
    (tmp_path / "a.py").write_text(f"from infcl_jax.evaluation import Task\nget_task = lambda: {task}\n")
    with pytest.raises(ValueError, match=message):
        evaluate, mesh = make_suite(benchmarks, 1, [str(tmp_path / "a.py")])
        evaluate(replicate(mesh, {"params": params}))


def write_damaged(folder, kind, *, leave_out):
    """Write a benchmark whose first and fifth images are damaged, or left out."""
    if kind == "retrieval":
        samples = [{"txt": "\n".join(texts).encode(), "jpg": captioned.jpeg(i)} for i, texts in enumerate(CAPTIONS)]
    else:
        samples = layout.classified(LABELS, TARGETS if kind == "multilabel" else GROUPS)
    for row in (0, 4):
        samples[row]["jpg"] = b"no image"
    if leave_out:
        samples = [sample for sample in samples if sample["jpg"] != b"no image"]
    layout.write_benchmark(folder / "wds_x", samples, kind=kind, shards=1)
    return folder


@pytest.mark.parametrize("kind", ["classification", "multilabel", "retrieval"])
def test_damaged_images_are_left_out(params, tmp_path, caplog, kind):
    fields = "main_metric='worst_group_top1'" if kind == "classification" else ""
    found = []
    for leave_out in (False, True):
        folder = write_damaged(tmp_path / str(leave_out), kind, leave_out=leave_out) / "wds_x"
        task = f"Task(name='x', dataset='{folder}', {fields})"
        (tmp_path / "x.py").write_text(f"from infcl_jax.evaluation import Task\nget_task = lambda: {task}\n")
        evaluate, mesh = make_suite(tmp_path, 8, [str(tmp_path / "x.py")], max_bad_records=0 if leave_out else 2)
        (result,) = evaluate.results(replicate(mesh, {"params": params}), examples=True)
        found.append((result.images, result.metrics, [example.expected for example in result.examples]))
    assert found[0] == found[1] and found[0][0] == IMAGES - 2
    data = f"{tmp_path}/False/wds_x, split test"
    (message,) = [line for line in caplog.messages if "left out" in line]
    count = f"2 of {IMAGES} images of {data}, cannot be read and are left out; first: bad record 0 of {data} (0.tar)"
    assert message.startswith(count)


def test_too_many_damaged_images_are_an_error(params, tmp_path):
    write_damaged(tmp_path, None, leave_out=False)
    evaluate, mesh = make_suite(tmp_path, 1, ["x"], max_bad_records=1)
    with pytest.raises(BadRecordError, match=r"^bad record 4 of [^\n]*more than the 1 bad records of a split"):
        evaluate(replicate(mesh, {"params": params}))
