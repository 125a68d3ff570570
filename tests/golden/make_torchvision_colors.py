"""Write torchvision_colors.npz: outputs of torchvision's color adjustments. Tests share the inputs.

    python tests/golden/make_torchvision_colors.py

Needs torchvision and the project's version of Pillow. Written with torchvision 0.29.2 and Pillow 13.0.0.
"""

from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("torchvision_colors.npz")

# Order of brightness, contrast, saturation and hue; their factors, the hue's in turns; whether to make the image gray.
CASES = (
    ((0, 1, 2, 3), (1.0, 1.0, 1.0, 0.0), False),
    ((0, 1, 2, 3), (1.0, 1.0, 1.0, 0.0), True),
    ((0, 1, 2, 3), (0.3, 1.0, 1.0, 0.0), False),
    ((0, 1, 2, 3), (1.7, 1.0, 1.0, 0.0), False),
    ((0, 1, 2, 3), (1.0, 0.2, 1.0, 0.0), False),
    ((0, 1, 2, 3), (1.0, 1.6, 1.0, 0.0), False),
    ((0, 1, 2, 3), (1.0, 1.0, 0.1, 0.0), False),
    ((0, 1, 2, 3), (1.0, 1.0, 1.9, 0.0), False),
    ((0, 1, 2, 3), (1.0, 1.0, 1.0, -0.5), False),
    ((0, 1, 2, 3), (1.0, 1.0, 1.0, 0.08), False),
    ((0, 1, 2, 3), (1.0, 1.0, 1.0, 0.31), False),
    ((0, 1, 2, 3), (0.7, 1.3, 1.2, -0.07), False),
    ((3, 2, 1, 0), (0.7, 1.3, 1.2, -0.07), False),
    ((2, 0, 3, 1), (1.3, 0.7, 1.3, 0.05), False),
    ((1, 3, 0, 2), (1.3, 1.3, 0.7, 0.4), True),
)


def image() -> np.ndarray:
    """Image uint8 [24, 24, 3]: a gradient of colors, white noise, and patches of pure colors and grays."""
    rows, columns = np.mgrid[:24, :24] * 11
    levels = np.stack([rows, columns, 255 - rows], axis=2).astype(np.uint8)
    levels[8:16] = np.random.PCG64(7).random_raw(72).astype("<u8").view(np.uint8).reshape(8, 24, 3)
    for column, color in enumerate(np.ndindex(2, 2, 2)):
        levels[16:20, 3 * column : 3 * column + 3] = np.multiply(color, 255)
        levels[20:, 3 * column : 3 * column + 3] = column * 36
    return levels


def main() -> None:
    """Run torchvision and write the golden file."""
    import torch
    from PIL import Image
    from torchvision.transforms import functional

    adjust = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    exact, rounded = [], []
    for order, factors, gray in CASES:
        tensor = torch.from_numpy(image()).permute(2, 0, 1).float() / 255
        picture = Image.fromarray(image())
        for operation in order:
            if factors[operation] != (0.0 if operation == 3 else 1.0):  # `ColorJitter` skips operations without range
                tensor = adjust[operation](tensor, factors[operation])
                picture = adjust[operation](picture, factors[operation])
        if gray:
            tensor = functional.rgb_to_grayscale(tensor, 3)
            picture = functional.rgb_to_grayscale(picture, 3)
        exact.append(tensor.permute(1, 2, 0).numpy())
        rounded.append(np.asarray(picture))
    np.savez_compressed(PATH, tensor=np.stack(exact).astype(np.float32), pil=np.stack(rounded))


if __name__ == "__main__":
    main()
