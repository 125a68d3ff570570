"""The configured evaluations against NumPy, on any number of devices."""

import captioned
import jax
import numpy as np
import oracle
import pytest
import runs

from infcl_jax.data import ByteTokenizer, classes, eval_batches, load_source
from infcl_jax.evaluation import EvaluationConfig, Suite, suite
from infcl_jax.runtime.mesh import replicate

GALLERY = 50
BOTH = {"retrieval_dataset": "digits", "zero_shot_dataset": "digits", "zero_shot_split": "zero_shot"}
TOKENIZER = ByteTokenizer(runs.CONTEXT)


@pytest.fixture(scope="module")
def params():
    arrays = (runs.batch(1)["image"], runs.batch(1)["text"])
    return jax.device_get(jax.jit(runs.Linear().init)(jax.random.key(0), *arrays)["params"])


def make_suite(devices=8, train_batch_size=None, prefixes=(), **config):
    return Suite(
        EvaluationConfig(batch_size=64, **config),
        runs.Linear(),
        TOKENIZER,
        image_size=runs.SIDE,
        data_dir="nowhere",
        mesh=oracle.mesh_of(devices),
        train_batch_size=train_batch_size,
        prefixes=prefixes,
    )


def test_rows_of_an_image_are_its_captions(tmp_path):
    captioned.write_folder(tmp_path, [(str(i), {"jpg": captioned.jpeg(i)}) for i in range(3)])
    captioned.write_csv(tmp_path / "a.csv", [(f"{i // 2}.jpg", f"caption {i}") for i in range(6)])
    opened = make_suite(retrieval_dataset=f"{tmp_path}/a.csv", retrieval_split="train")
    assert opened.chance["validation/loss"] == pytest.approx(np.log(3))


@pytest.fixture(scope="module")
def results(params):
    return make_suite(gallery=GALLERY, **BOTH)(replicate(oracle.mesh_of(8), {"params": params}))


@pytest.fixture(scope="module")
def encode(params):
    model = runs.Linear()
    jitted = {
        name: jax.jit(lambda x, name=name: model.apply({"params": params}, x, method=f"encode_{name}"))
        for name in ("image", "text")
    }

    def run(split):
        """Image features, text features and labels of a split of the digits, in fp64."""
        batches = eval_batches(load_source("digits", split), tokenizer=TOKENIZER, image_size=runs.SIDE, batch_size=300)
        (batch,) = batches
        keep = batch["mask"]
        image, text = (np.asarray(jitted[name](batch[name]), np.float64) for name in ("image", "text"))
        return image[keep], text, batch["label"][keep]

    def encode_texts(texts):
        return np.asarray(jitted["text"](TOKENIZER(texts)), np.float64)

    return run, encode_texts, lambda images: np.asarray(jitted["image"](images), np.float64)


class RaggedSource:
    """Noise with one to four captions an image, some of which several images share."""

    name, split = "ragged", "validation"

    def __len__(self):
        return 37

    def __getitem__(self, index):
        image = np.random.default_rng(index).integers(0, 256, (runs.SIDE, runs.SIDE, 3), dtype=np.uint8)
        captions = tuple(f"{(index + 5 * form) % 41} {form}" for form in range(1 + index % 4))
        captions += ("a shared caption",) if index % 9 == 0 else ()
        return {"image": image, "caption": captions[0], "captions": captions, "label": -1}


@pytest.mark.parametrize(("devices", "gallery"), [(1, None), (8, 20)])
def test_all_captions_are_retrieved_and_the_first_has_a_loss(params, encode, monkeypatch, devices, gallery):
    source = RaggedSource()
    monkeypatch.setattr(suite, "load_benchmark", lambda *arguments: source)
    variables = replicate(oracle.mesh_of(devices), {"params": params})
    results = make_suite(devices, retrieval_dataset="ragged", gallery=gallery)(variables)
    captions = [source[i]["captions"] for i in range(len(source))]
    image = encode[2](np.stack([source[i]["image"] for i in range(len(source))]))
    first = encode[1]([texts[0] for texts in captions])
    scale = float(np.exp(params["logit_scale"]))
    np.testing.assert_allclose(results["validation/loss"], oracle.clip(image, first, scale)[0], rtol=1e-5)
    image, captions = image[:gallery], captions[:gallery]
    owner = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
    similarity = image @ encode[1]([text for texts in captions for text in texts]).T
    own = owner == np.arange(len(image))[:, None]
    threshold = np.where(own, similarity, -np.inf).max(axis=1)[:, None], similarity[owner, np.arange(len(owner))]
    for k in (1, 5, 10):
        for way, axis in (("image_to_text", 1), ("text_to_image", 0)):
            rivals = (~own & (similarity >= threshold[axis == 0] - 1e-6)).sum(axis=axis)
            assert results[f"retrieval/{way}_r{k}"] == pytest.approx((rivals < k).mean(), abs=1e-9)


def test_zero_shot_equals_numpy(results, encode):
    image, _, label = encode[0]("zero_shot")
    names, templates = classes(load_source("digits", "zero_shot"))
    prompts = [np.stack([encode[1]([template.format(name)])[0] for template in templates]) for name in names]
    embeddings = oracle.unit(np.stack([oracle.unit(prompt).mean(axis=0) for prompt in prompts]))
    ranked = (image @ embeddings.T).argsort(axis=1)
    for k in (1, 5):
        expected = (ranked[:, -k:] == label[:, None]).any(axis=1).mean()
        assert abs(results[f"zero_shot/top{k}"] - expected) <= 1 / len(label)


@pytest.mark.parametrize("lead", [True, False])
def test_the_lead_draws_what_it_found(params, tmp_path, monkeypatch, lead):
    monkeypatch.setattr(suite, "is_lead", lambda: lead)
    results = make_suite(1, retrieval_dataset="digits")(
        replicate(oracle.mesh_of(1), {"params": params}), tmp_path / "grid.png"
    )
    assert (tmp_path / "grid.png").exists() == lead
    assert {name.split("/")[0] for name in results} == {"validation", "retrieval"}


@pytest.mark.parametrize(("size", "names"), [(32, {"loss", "batch_loss"}), (100_000, {"loss"}), (None, {"loss"})])
def test_the_loss_of_training_batches_is_measured_where_the_split_has_that_many_pairs(params, size, names):
    suite = make_suite(8, train_batch_size=size, retrieval_dataset="digits")
    results = suite(replicate(oracle.mesh_of(8), {"params": params}))
    assert {name.removeprefix("validation/") for name in results if name.startswith("validation/")} == names
    pairs = len(load_source("digits", "validation"))
    levels = {"loss": size, "validation/batch_loss": size} if size else {}
    assert suite.chance == pytest.approx(
        {name: np.log(number) for name, number in (levels | {"validation/loss": pairs}).items()}
    )


def test_the_names_of_the_results_are_known_before(results):
    both = make_suite(gallery=GALLERY, **BOTH)
    assert both.metric_names == sorted(results) and both.chance["zero_shot/top1"] == 0.1
    cut = make_suite(prefixes=(5,), zero_shot_dataset="digits", zero_shot_split="zero_shot").metric_names
    assert {"zero_shot/top1", "zero_shot@5/top1"} < set(cut) and "validation/loss" not in cut


def test_nothing_configured_evaluates_nothing(params):
    assert make_suite()({"params": params}) == {}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"retrieval_dataset": "shapes/quickstart"}, FileNotFoundError, "experiments.prepare_data"),
        ({"retrieval_dataset": "digits", "retrieval_split": "test"}, ValueError, "split of digits must be one of"),
        ({"zero_shot_dataset": "digit"}, ValueError, "dataset must be one of"),
    ],
)
def test_datasets_that_are_not_there_are_refused_at_once(config, error, message):
    with pytest.raises(error, match=message):
        make_suite(**config)


def test_zero_shot_needs_classes_and_retrieval_captions(tmp_path):
    samples = [(f"{key}/{i}", {"jpg": contents["jpg"]}) for i, (key, contents) in enumerate(captioned.samples(4))]
    captioned.write_folder(tmp_path / "classes", [(f"kind {name}", contents) for name, contents in samples])
    captioned.write_folder(tmp_path / "captions", captioned.samples(4))
    where = {"zero_shot_split": "train", "retrieval_split": "train"}
    with pytest.raises(ValueError, match=r"captions has no classes; put the images of each class into a subfolder"):
        make_suite(zero_shot_dataset=f"{tmp_path}/captions", **where)
    with pytest.raises(ValueError, match=r"retrieval_dataset with captions, got '.*/classes', which has only classes"):
        make_suite(retrieval_dataset=f"{tmp_path}/classes", **where)
    make_suite(zero_shot_dataset=f"{tmp_path}/classes", retrieval_dataset=f"{tmp_path}/captions", **where)


def test_prefixes_equal_numpy(params, results, encode):
    dim = 5
    variables = replicate(oracle.mesh_of(8), {"params": params})
    cut = make_suite(gallery=GALLERY, prefixes=(dim, 8), **BOTH)(variables)
    assert {name: cut[name] for name in results} == results
    assert {name.split("/")[0] for name in cut.keys() - results.keys()} == {f"retrieval@{dim}", f"zero_shot@{dim}"}
    image, text = (array[:GALLERY, :dim] for array in encode[0]("validation")[:2])
    recall = ((oracle.unit(text) @ oracle.unit(image).T).argmax(axis=1) == np.arange(GALLERY)).mean()
    assert abs(cut[f"retrieval@{dim}/text_to_image_r1"] - recall) <= 1 / GALLERY
    image, _, label = encode[0]("zero_shot")
    names, templates = classes(load_source("digits", "zero_shot"))
    prompts = [np.stack([encode[1]([template.format(name)])[0] for template in templates]) for name in names]
    embeddings = oracle.unit(np.stack([oracle.unit(prompt[:, :dim]).mean(axis=0) for prompt in prompts]))
    expected = ((oracle.unit(image[:, :dim]) @ embeddings.T).argmax(axis=1) == label).mean()
    assert abs(cut[f"zero_shot@{dim}/top1"] - expected) <= 1 / len(label)
