"""Features of a split: without padding, ordered, equal on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.evaluation import encode_split
from infcl_jax.inference.features import l2_normalize, shard_rows
from infcl_jax.runtime.mesh import data_mesh, replicate

SIDE, LENGTH, DIM = 4, 6, 5


def encode_image(params, image):
    flat = image.reshape(len(image), -1).astype(jnp.float32) / 255
    return flat @ params["image"]


def encode_text(params, text):
    return params["text"][text].mean(axis=1)


def make_params(rng):
    return {
        "image": rng.normal(size=(SIDE * SIDE * 3, DIM)).astype(np.float32),
        "text": rng.normal(size=(50, DIM)).astype(np.float32),
    }


def make_batches(rng, sizes, rows, first_index=0):
    """Batches of `rows` rows: `size` images with one to four captions, then padding with conspicuous values."""
    batches = []
    for size in sizes:
        index = np.full(rows, 10**15, np.int64)
        index[:size] = first_index + np.arange(size)
        first_index += size
        text_index = np.repeat(index[:size], rng.integers(1, 5, size))
        batches.append(
            {
                "image": rng.integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8),
                "label": rng.integers(-1, 7, rows, dtype=np.int32),
                "index": index,
                "mask": np.arange(rows) < size,
                "text": rng.integers(0, 50, (len(text_index), LENGTH), dtype=np.int32),
                "text_index": text_index,
            }
        )
    return batches


def expected(params, batches):
    samples = {key: np.concatenate([b[key][b["mask"]] for b in batches]) for key in ("image", "label", "index")}
    samples |= {key: np.concatenate([b[key] for b in batches]) for key in ("text", "text_index")}
    image = samples["image"].reshape(len(samples["image"]), -1).astype(np.float64) / 255
    return samples, image @ params["image"], params["text"][samples["text"]].astype(np.float64).mean(axis=1)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("sizes", "rows"), [((16, 16, 3), 16), ((13, 13, 5), 13), ((1,), 1)])
def test_equals_numpy_on_the_unpadded_rows(devices, sizes, rows):
    rng = np.random.default_rng(0)
    mesh = data_mesh(jax.devices()[:devices])
    params, batches = make_params(rng), make_batches(rng, sizes, rows, first_index=2**40)
    features = encode_split(encode_image, encode_text, replicate(mesh, params), batches, mesh)
    samples, image, text = expected(params, batches)
    assert len(features) == sum(sizes)
    assert (features.image.dtype, features.text.dtype) == (np.float32, np.float32)
    assert (features.label.dtype, features.index.dtype) == (np.int32, np.int64)
    np.testing.assert_allclose(features.image, image, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(features.text, text, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(features.label, samples["label"])
    np.testing.assert_array_equal(features.index, samples["index"])
    np.testing.assert_array_equal(features.index[features.text_image], samples["text_index"])
    first = [text[np.flatnonzero(samples["text_index"] == index)[0]] for index in samples["index"]]
    np.testing.assert_allclose(features.first_text, first, rtol=1e-5, atol=1e-5)


def test_rows_come_back_in_order_of_index():
    rng = np.random.default_rng(1)
    mesh = data_mesh()
    params, batches = make_params(rng), make_batches(rng, (8, 8, 8), 8)
    forward = encode_split(encode_image, encode_text, replicate(mesh, params), batches, mesh)
    backward = encode_split(encode_image, encode_text, replicate(mesh, params), batches[::-1], mesh)
    np.testing.assert_array_equal(backward.index, np.arange(24))
    for field in ("image", "label", "text", "text_image"):
        np.testing.assert_array_equal(getattr(backward, field), getattr(forward, field))


def test_images_alone_need_no_captions():
    rng = np.random.default_rng(6)
    mesh = data_mesh()
    params, batches = replicate(mesh, make_params(rng)), make_batches(rng, (8, 3), 8)
    whole = encode_split(encode_image, encode_text, params, batches, mesh)
    for batch in batches:
        del batch["text"], batch["text_index"]
    images = encode_split(encode_image, None, params, batches, mesh)
    np.testing.assert_array_equal(images.image, whole.image)
    assert images.text.shape == (0, DIM) and images.text_image.shape == (0,)


def test_a_shorter_last_batch_and_a_second_evaluation_do_not_compile_again():
    rng = np.random.default_rng(2)
    mesh = data_mesh()
    traces = []

    def counted(encode):
        def traced(params, inputs):
            traces.append(inputs.shape)
            return encode(params, inputs)

        return traced

    params, encoders = replicate(mesh, make_params(rng)), (counted(encode_image), counted(encode_text))
    batches = make_batches(rng, (16,), 16) + make_batches(rng, (5,), 5, first_index=16)
    for _ in range(2):
        assert len(encode_split(*encoders, params, batches, mesh)) == 21
    assert traces == [(16, SIDE, SIDE, 3), (16, LENGTH)]


def test_bfloat16_encoders_give_float32_features_of_bfloat16_values():
    rng = np.random.default_rng(3)
    mesh = data_mesh()
    params, batches = make_params(rng), make_batches(rng, (8,), 8)

    def half(params, image):
        return encode_image(params, image).astype(jnp.bfloat16)

    features = encode_split(half, encode_text, replicate(mesh, params), batches, mesh)
    assert features.image.dtype == np.float32
    np.testing.assert_array_equal(features.image, features.image.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batches: [], "at least one evaluation batch"),
        (lambda batches: [{k: v for k, v in batches[0].items() if k != "mask"}], "mask"),
        (lambda batches: [batches[0] | {"label": np.zeros(3, np.int32)}], "one length"),
        (lambda batches: [batches[0] | {"mask": np.zeros(8, bool)}], "only padding"),
        (lambda batches: [{k: v for k, v in batches[0].items() if k != "text_index"}], "text_index"),
        (lambda batches: [batches[0] | {"text_index": np.zeros(3, np.int64)}], "one length"),
        (
            lambda batches: [batches[0] | {k: batches[0][k][:1] for k in ("text", "text_index")}],
            "got none for 7 of 8 images",
        ),
        (lambda batches: [batches[0] | {"text_index": batches[0]["text_index"] + 1}], "those of 1 others"),
        (
            lambda batches: [batches[0] | {k: batches[0][k][:0] for k in ("text", "text_index")}],
            "got none for 8 of 8 images",
        ),
    ],
)
def test_bad_batches_are_named(change, message):
    rng = np.random.default_rng(4)
    mesh = data_mesh()
    batches = change(make_batches(rng, (8,), 8))
    with pytest.raises(ValueError, match=message):
        encode_split(encode_image, encode_text, replicate(mesh, make_params(rng)), batches, mesh)


def test_an_encoder_without_pooling_is_refused():
    rng = np.random.default_rng(5)
    mesh = data_mesh()
    with pytest.raises(ValueError, match="pool and project"):
        encode_split(
            encode_image,
            lambda params, text: params["text"][text],
            replicate(mesh, make_params(rng)),
            make_batches(rng, (8,), 8),
            mesh,
        )


def test_shard_rows_gives_each_device_the_multiple_asked_for():
    mesh = data_mesh()
    array = np.arange(1, 12, dtype=np.int32)
    sharded = shard_rows(mesh, array, fill=-1, multiple=3)
    assert [shard.data.shape for shard in sharded.addressable_shards] == [(3,)] * 8
    np.testing.assert_array_equal(np.asarray(sharded), np.concatenate([array, np.full(13, -1)]))


def test_l2_normalize_at_zero_and_infinity():
    unit = l2_normalize(np.array([[3, 4], [0, 0], [np.inf, 1], [1e-30, 0]], np.float32))
    np.testing.assert_allclose(unit[[0, 1, 3]], [[0.6, 0.8], [0.0, 0.0], [1.0, 0.0]], rtol=1e-6)
    assert np.isnan(unit[2, 0])
