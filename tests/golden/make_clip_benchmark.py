"""Metrics of clip_benchmark on random features, for `tests/evaluation/test_clip_benchmark.py`.

    OMP_NUM_THREADS=1 python tests/golden/make_clip_benchmark.py

Written with clip_benchmark 1.6.2, scikit-learn 1.9.1 and torch 2.13.0 on Python 3.11. The model returns fixed features,
so only the metrics are clip_benchmark's work. Features are random, so no similarities tie.
"""

import types
from pathlib import Path

import numpy as np
import torch
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval

DIM, IMAGES, CLASSES, TEMPLATES = 8, 90, 9, 3
LABELED_CLASSES = 8  # the last class has no images
KS = (1, 5, 10)

# It calls float() on arrays of one element, which NumPy 2.4 no longer converts.
zeroshot_classification.float = lambda value: np.asarray(value).item()


class Model:
    """Model whose inputs are rows of features."""

    def __init__(self, image, text):
        self.image, self.text = torch.tensor(image), torch.tensor(text)

    def encode_image(self, rows):
        return self.image[rows.long()]

    def encode_text(self, rows):
        return self.text[rows.long()]


class Loader:
    """Batches of image rows and targets; `dataset.classes` are the class names."""

    def __init__(self, batches, classes=()):
        self.batches, self.dataset = batches, types.SimpleNamespace(classes=classes)

    def __iter__(self):
        return iter(self.batches)


def tokenizer(texts):
    """Row of each text, which is a number."""
    return torch.tensor([int(text) for text in texts])


def classification(image, prompts, targets):
    """Evaluate in two batches, the second of which is smaller."""
    rows, names = torch.arange(len(image)), [str(label) for label in range(CLASSES)]
    loader = Loader([(rows[:64], targets[:64]), (rows[64:], targets[64:])], names)
    # Prompt t of class c is row c * TEMPLATES + t.
    templates = {name: [str(int(name) * TEMPLATES + t) for t in range(TEMPLATES)] for name in names}
    model = Model(image, prompts.reshape(-1, DIM))
    return zeroshot_classification.evaluate(model, loader, tokenizer, names, templates, "cpu", amp=False)


def retrieval(image, text, captions):
    """Evaluate retrieval with `captions[i]` captions of image i."""
    starts = np.cumsum([0, *captions])
    texts = [[str(row) for row in range(starts[i], starts[i + 1])] for i in range(len(image))]
    rows = torch.arange(len(image))
    loader = Loader([(rows[:64], texts[:64]), (rows[64:], texts[64:])])
    return zeroshot_retrieval.evaluate(Model(image, text), loader, tokenizer, "cpu", amp=False, recall_k_list=list(KS))


def main():
    rng = np.random.default_rng(0)
    prompts = rng.standard_normal((CLASSES, TEMPLATES, DIM)).astype(np.float32)
    label = rng.choice(LABELED_CLASSES, IMAGES, p=np.arange(1, 9) / 36)
    image = (rng.standard_normal((IMAGES, DIM)) + prompts.mean(axis=1)[label]).astype(np.float32)
    targets = rng.random((IMAGES, CLASSES)) < 0.2
    targets[np.arange(IMAGES), label] = True
    captions = rng.integers(1, 6, IMAGES)
    text_image = np.repeat(np.arange(IMAGES), captions)
    text = (rng.standard_normal((len(text_image), DIM)) + image[text_image]).astype(np.float32)
    results = {f"single/{k}": v for k, v in classification(image, prompts, torch.tensor(label)).items()}
    results |= {f"multi/{k}": v for k, v in classification(image, prompts, torch.tensor(targets)).items()}
    results |= {f"retrieval/{k}": v for k, v in retrieval(image, text, captions).items()}
    arrays = {"image": image, "prompts": prompts, "label": label, "targets": targets}
    arrays |= {"text": text, "text_image": text_image}
    path = Path(__file__).with_name("clip_benchmark.npz")
    np.savez_compressed(path, **arrays, **{name: np.float64(value) for name, value in results.items()})
    print({name: round(float(value), 4) for name, value in results.items()}, path.stat().st_size)


if __name__ == "__main__":
    main()
