"""Decoder that stands in for a GPU's."""

import io

import jax
import numpy as np
from PIL import Image

from infcl_jax.data.transforms import Box, resize_box


class StandIn:
    """Decoder with Pillow; refuses the files that `refuses`."""

    def __init__(self, device, refuses=lambda data: False):
        self.device, self.refuses, self.decoded = device, refuses, 0

    def __call__(self, encoded, boxes, size):
        images, refused = np.full((len(encoded), size, size, 3), 77, np.uint8), []
        assert boxes.shape == (len(encoded), 4) and boxes.dtype == np.float32
        for row, (data, box) in enumerate(zip(encoded, boxes.tolist(), strict=True)):
            if not data.size or self.refuses(data.tobytes()):
                refused.append(row)
                continue
            image = Image.open(io.BytesIO(data.tobytes()))
            assert image.format == "JPEG"
            images[row] = resize_box(image.convert("RGB"), Box(*box), size)
            self.decoded += 1
        return lambda: jax.device_put(images, self.device), refused
