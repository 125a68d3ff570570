"""`experiments.embed`: the encoder's features with keys, also after kill -9; INFCL_EMBED_IMAGES sets the images."""

import os

import captioned
import jax
import numpy as np
import pytest
import runs

import infcl_jax
from infcl_jax.data import load_source
from infcl_jax.evaluation import read_features
from infcl_jax.runtime.mesh import data_mesh

IMAGES = int(os.environ.get("INFCL_EMBED_IMAGES", "600"))
BATCH = 8 if IMAGES == 600 else 256
SHARDS = -(-IMAGES // (16 * BATCH))
DIFFERENT = 64  # images of the tar file, repeated


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    runs.save(workdir, {1: 1.0})
    return workdir


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    images = [captioned.jpeg(number, (16, 16)) for number in range(DIFFERENT)]
    members = [
        (f"{i:06d}.{extension}", content)
        for i in range(IMAGES)
        for extension, content in (("jpg", images[i % DIFFERENT]), ("txt", f"caption {i % DIFFERENT}".encode()))
    ]
    return captioned.write_tar(tmp_path_factory.mktemp("data") / "images.tar", members)


def flags(model, source, output, *others):
    return [f"--model={model}", f"--source={source}", f"--output={output}", f"--batch_size={BATCH}", *others]


def embed(*arguments, module=("experiments.embed",)):
    return runs.command(module[0], *module[1:], *flags(*arguments), seconds=3000)


@pytest.fixture(scope="module")
def expected(workdir, tar):
    """Features of the different images by the encoder."""
    encoder = infcl_jax.load(workdir, mesh=data_mesh(jax.devices()[:1]))
    source = load_source(str(tar), "train")
    return encoder.encode_images([source[i]["image"] for i in range(DIFFERENT)])


@pytest.fixture(scope="module")
def outputs(workdir, tar, tmp_path_factory):
    """Outputs of commands that were not killed, by extension."""
    folder, files = tmp_path_factory.mktemp("whole"), {}
    for extension in ("safetensors", "npy", "parquet"):
        files[extension] = folder / f"features.{extension}"
        finished = embed(workdir, tar, files[extension])
        assert finished.returncode == 0, finished.stderr
        assert f"images [{IMAGES}, 16] in " in finished.stdout
    return files


def test_features_are_those_of_the_encoder(outputs, expected):
    for path in outputs.values():
        rows = read_features(path)
        np.testing.assert_allclose(rows.feature, expected[np.arange(IMAGES) % DIFFERENT], atol=1e-6)
        np.testing.assert_array_equal(rows.index, np.arange(IMAGES))
        assert list(rows.key) == [f"{i:06d}" for i in range(IMAGES)]
        assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize(
    ("extension", "rename"),
    [
        pytest.param("safetensors", 1, marks=pytest.mark.full, id="manifest"),
        pytest.param("safetensors", 2 + SHARDS // 2, id="halfway"),
        pytest.param("safetensors", 2 + SHARDS, marks=pytest.mark.full, id="output"),
        pytest.param("npy", 3 + SHARDS, id="output after keys"),
    ],
)
def test_a_killed_command_continues_to_the_same_bytes(workdir, tar, outputs, tmp_path, extension, rename):
    output = tmp_path / f"features.{extension}"
    killed = embed(workdir, tar, output, module=("tests.faults.killed", str(rename), "experiments.embed"))
    assert killed.returncode == -9 and not output.exists()
    finished = embed(workdir, tar, output)
    assert finished.returncode == 0, finished.stderr
    done = min(max(rename - 2, 0), SHARDS)
    assert (f"continues after {done} of {SHARDS} shards" in finished.stdout) == (done > 0)
    assert output.read_bytes() == outputs[extension].read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_captions_are_encoded_with_the_key_of_their_image(workdir, tmp_path):
    captions = [[f"image {i} {j}" for j in range(i % 3 + 1)] for i in range(30)]
    folder = captioned.write_folder(tmp_path / "images", [(f"{i}", {"jpg": captioned.jpeg(i)}) for i in range(30)])
    lines = [
        f'{{"file_name": "{i}.jpg", "text": {str(texts).replace(chr(39), chr(34))}}}'
        for i, texts in enumerate(captions)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    finished = embed(workdir, folder, tmp_path / "captions.npy", "--captions")
    assert finished.returncode == 0, finished.stderr
    rows = read_features(tmp_path / "captions.npy")
    texts = [text for image in captions for text in image]
    np.testing.assert_allclose(rows.feature, infcl_jax.load(workdir).encode_texts(texts), atol=1e-5)
    owner = [i for i, image in enumerate(captions) for _ in image]
    assert rows.index.tolist() == owner and list(rows.key) == [f"{i}.jpg" for i in owner]


@pytest.fixture
def damaged(tmp_path):
    """A folder of 40 images, two of them damaged."""
    contents = captioned.samples(40)
    for number in (3, 20):
        contents[number][1]["jpg"] = b"\xff\xd8\xff damaged"
    return captioned.write_folder(tmp_path / "damaged", contents)


def test_damaged_images_are_left_out_and_counted(workdir, damaged, tmp_path):
    finished = embed(workdir, damaged, tmp_path / "features.safetensors")
    assert finished.returncode == 0 and "images [38, 16]" in finished.stdout
    assert finished.stdout.rstrip().endswith("left out: 2 bad records")
    for number in (3, 20):
        assert f"bad record {number} of {damaged}, split train ({number:06d}.jpg)" in finished.stderr
    rows = read_features(tmp_path / "features.safetensors")
    assert rows.index.tolist() == [i for i in range(40) if i not in (3, 20)] and rows.key[3] == "000004.jpg"


def test_too_many_damaged_images_stop_the_command(workdir, damaged, tmp_path):
    status, _, stderr = embed(workdir, damaged, tmp_path / "features.npy", "--max_bad_records=1")
    assert status == 1 and "error: 2 bad records, more than the 1 of --max_bad_records" in stderr


def test_another_model_source_or_output_is_refused(workdir, damaged, tmp_path):
    output = tmp_path / "features.npy"
    embed(workdir, damaged, output, module=("tests.faults.killed", "2", "experiments.embed"))
    model = tmp_path / "other"
    runs.save(model, {1: 2.0})
    (damaged / "000040.jpg").write_bytes(captioned.jpeg(40))
    (damaged / "000040.txt").write_text("new")
    for arguments, names in [((workdir, damaged), "source, samples"), ((model, damaged), "model, source, samples")]:
        status, _, stderr = embed(*arguments, output)
        assert (
            status == 1 and f"error: expected {tmp_path}/.features.npy.shards to be of the same {names}, got" in stderr
        )
    (tmp_path / "other.npy").touch()
    status, _, stderr = embed(workdir, damaged, tmp_path / "other.npy")
    assert status == 1 and "which exists; delete it or choose another" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "digits", "x.npy"), "expected --model, --source and --output"),
        (("runs/x", "digits", "x.csv"), "one of the extensions .safetensors, .npy, .parquet, got x.csv"),
        (("runs/x", "digits", "x.npy"), "expected the work directory of a run"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    status, _, stderr = embed(*arguments)
    assert status == 1 and stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr


@pytest.mark.parametrize(
    ("captions", "workers"),
    [
        pytest.param((), ("--num_workers=1",), id="images, workers"),
        pytest.param(("--captions",), (), marks=pytest.mark.full, id="captions"),
    ],
)
def test_two_processes_write_the_rows_of_one(workdir, damaged, tmp_path, captions, workers):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert embed(workdir, damaged, one, *captions).returncode == 0
    command = ("experiments.embed", *flags(workdir, damaged, two, *captions, *workers))
    finished = runs.finish(*runs.start_cluster(2, *command))
    assert [process.returncode for process in finished] == [0, 0], finished
    assert not any("leaked shared_memory" in process.stderr for process in finished), finished
    rows, expected = read_features(two), read_features(one)
    np.testing.assert_allclose(rows.feature, expected.feature, atol=1e-6)
    assert rows.index.tolist() == expected.index.tolist() and rows.key == expected.key
