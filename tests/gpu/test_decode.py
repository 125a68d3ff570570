"""The GPU's decoder against Pillow's."""

import io

import jax
import numpy as np
import pytest
from PIL import Image

from experiments.benchmarks.photographs import encode, photograph
from infcl_jax.data import Augmentation
from infcl_jax.data.decode import gpu_decoder_installed
from infcl_jax.data.transforms import resize_box

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_decoder_installed(), reason="needs infcl_jax[gpu-decode]")]


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}], ids=str)
def test_gpu_decodes_like_pillow(options):
    from infcl_jax.data.decode.nvimgcodec import open_decoders

    files = [encode(photograph(seed, 480 + seed, 640 - 7 * seed), quality=90, **options) for seed in range(20)]
    boxes = [
        Augmentation().draw(480 + seed, 640 - 7 * seed, np.random.default_rng(seed)).box for seed in range(len(files))
    ]
    device = jax.local_devices()[0]
    decoder = open_decoders([device], len(files) + 1, 224)[device]
    encoded = [np.frombuffer(data, np.uint8) for data in [*files, files[0][200:]]]
    wait, refused = decoder(encoded, np.array([*boxes, boxes[0]], np.float32), 224)
    images = np.asarray(wait())
    assert len(files) in refused
    for row in set(range(len(files))) - set(refused):
        expected = resize_box(Image.open(io.BytesIO(files[row])).convert("RGB"), boxes[row], 224)
        difference = np.abs(images[row].astype(int) - expected)
        assert difference.mean() < 2 and np.quantile(difference, 0.999) <= 16
    assert len(refused) == 1 or options.get("progressive")
