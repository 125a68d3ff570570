"""Handwritten digits of scikit-learn."""

import numpy as np
from PIL import Image

from infcl_jax.data.sources.base import Classes, Example, check_split

DIGITS = "digits"
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_TEMPLATES = (
    "a handwritten {}",
    "the digit {}",
    "the number {} written by hand",
    "a scan of the number {}",
    "a small picture of the digit {}",
)
_DIGIT_SPLITS = ("train", "validation", "zero_shot")
_DIGIT_SIZE = 32


class DigitsSource:
    """Handwritten digits of scikit-learn with generated captions.

    The dataset has 1797 images (UCI, 8 x 8 pixels), resized to 32 x 32. The split is stratified and fixed: 70 % train,
    15 % validation and 15 % zero_shot of every class. Images of the training split have all ten captions of their
    class, the others one of them in turn.
    """

    name = DIGITS
    captioned = True

    def __init__(self, split: str):
        check_split(self.name, split, _DIGIT_SPLITS)
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the digits dataset needs scikit-learn: pip install scikit-learn") from error
        self.split = split
        digits = load_digits()
        rows = _stratified_rows(digits.target, split)
        gray = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
        size = (_DIGIT_SIZE, _DIGIT_SIZE)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in gray]
        self._images = np.stack([np.asarray(image) for image in resized])
        self._labels = digits.target[rows]

    def __len__(self) -> int:
        return len(self._labels)

    def classes(self) -> Classes:
        """Return the ten digits and their templates."""
        return Classes(DIGIT_NAMES, DIGIT_TEMPLATES)

    def __getitem__(self, index: int) -> Example:
        label = int(self._labels[index])
        words = (DIGIT_NAMES[label], str(label))
        captions: tuple[str, ...] = tuple(template.format(word) for template in DIGIT_TEMPLATES for word in words)
        image = np.repeat(self._images[index][..., None], 3, axis=2)
        if self.split != "train":
            # Every image of the class would have all captions, and tie in retrieval. One of them for each image
            # in turn covers all forms.
            captions = (captions[index % len(captions)],)
        return {"image": image, "caption": captions[0], "captions": captions, "label": label}


def _stratified_rows(labels: np.ndarray, split: str) -> np.ndarray:
    shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(len(labels))
    rows = []
    for label in range(len(DIGIT_NAMES)):
        members = shuffled[labels[shuffled] == label]
        bounds = [round(len(members) * fraction) for fraction in (0.70, 0.85)]
        rows.append(np.split(members, bounds)[_DIGIT_SPLITS.index(split)])
    return np.sort(np.concatenate(rows))
