"""Write torchvision_transforms.npz: outputs of torchvision's transforms. Tests share the inputs.

    python tests/golden/make_torchvision_transforms.py

Needs torchvision and the project's version of Pillow. Written with torchvision 0.28.0 and Pillow 13.0.0.
"""

import hashlib
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("torchvision_transforms.npz")

# Height and width in pixels: landscape, portrait, square, narrow, smaller and larger than the output.
SHAPES = (
    (225, 224),
    (224, 225),
    (224, 224),
    (427, 640),
    (640, 427),
    (480, 640),
    (301, 300),
    (40, 40),
    (33, 64),
    (31, 1000),
    (1000, 31),
    (1, 7),
    (7, 1),
    (1, 1),
)
SIZES = (32, 33, 224, 225)

# Height, width, scale and ratio of random crops. The first three reject every try, or most, by their aspect ratio.
BOXES = (
    (427, 640, (0.9, 1.0), (3 / 4, 4 / 3)),
    (640, 400, (0.8, 1.0), (3 / 4, 4 / 3)),
    (480, 640, (0.9, 1.0), (3 / 4, 4 / 3)),
    (224, 224, (0.9, 1.0), (3 / 4, 4 / 3)),
    (32, 32, (0.8, 1.0), (3 / 4, 4 / 3)),
    (427, 640, (0.08, 1.0), (3 / 4, 4 / 3)),
    (100, 90, (0.2, 0.5), (1 / 3, 2.0)),
    (1, 7, (0.1, 1.0), (3 / 4, 4 / 3)),
    (7, 1, (0.9, 1.0), (3 / 4, 4 / 3)),
)
DRAWS = 20_000
POINTS = 65  # of each stored distribution function


def noise(height: int, width: int) -> np.ndarray:
    """White noise, uint8 [height, width, 3], from the reproducible bit stream of PCG64."""
    count = height * width * 3
    words = np.random.PCG64(height * 10_000 + width).random_raw(-(-count // 8)).astype("<u8")
    return words.view(np.uint8)[:count].reshape(height, width, 3)


def center(image: np.ndarray) -> np.ndarray:
    """The central 8 x 8 pixels."""
    top, left = (side // 2 - 4 for side in image.shape[:2])
    return image[top : top + 8, left : left + 8]


def digest(image: np.ndarray) -> str:
    """SHA-256 of the pixels, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()


def box_statistics(boxes: np.ndarray) -> np.ndarray:
    """Area, width, top, left [4, n] of boxes [n, 4] (top, left, height, width)."""
    top, left, height, width = np.asarray(boxes).T
    return np.stack([height * width, width, top, left])


def distribution(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Empirical distribution functions of `values` [4, n] at `points` [4, p]."""
    return np.stack([(row[None, :] <= at[:, None]).mean(axis=1) for row, at in zip(values, points, strict=True)])


def main() -> None:
    """Run torchvision and write the golden file."""
    import torch
    from PIL import Image
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, RandomResizedCrop, Resize

    centers, digests = [], []
    for shape in SHAPES:
        for size in SIZES:
            transform = Compose([Resize(size, interpolation=InterpolationMode.BICUBIC), CenterCrop(size)])
            output = np.asarray(transform(Image.fromarray(noise(*shape))))
            centers.append(center(output))
            digests.append(digest(output))
    torch.manual_seed(0)
    points, shares = [], []
    for height, width, scale, ratio in BOXES:
        image = Image.new("RGB", (width, height))
        boxes = [RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(DRAWS)]
        values = box_statistics(np.array(boxes))
        points.append(np.quantile(values, np.linspace(0, 1, POINTS), axis=1, method="nearest").T)
        shares.append(distribution(values, points[-1]))
    cases = (len(SHAPES), len(SIZES))
    np.savez_compressed(
        PATH,
        centers=np.stack(centers).reshape(*cases, 8, 8, 3),
        digests=np.array(digests).reshape(cases),
        points=np.stack(points).astype(np.int32),
        shares=np.stack(shares).astype(np.float32),
    )


if __name__ == "__main__":
    main()
