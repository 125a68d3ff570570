"""Write open_clip_evaluation.npz: benchmark numbers of a small OpenCLIP model, for `test_evaluate_weights.py`.

    pip install open_clip_torch clip_benchmark
    OMP_NUM_THREADS=1 python tests/golden/make_open_clip_evaluation.py

Written with open_clip_torch 3.3.0, clip_benchmark 1.6.2, torch 2.13.0 and Pillow 13.0. The model has random weights and
reads bytes, so that the test needs no vocabulary. OpenCLIP's transform reads the JPEG files, its model encodes images
and texts, and clip_benchmark computes the metrics. The file holds the weights, the JPEG files and the metrics. Its
texts hold the configuration, labels, class names, templates and captions. The script fails if rounding could change a
rank.
"""

import io
import json
from pathlib import Path

import numpy as np
import open_clip
import torch
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from make_clip_benchmark import KS, Loader  # also makes clip_benchmark run with NumPy 2.4
from open_clip.transform import image_transform
from PIL import Image

IMAGES, SIDE, CONTEXT, SEED = 22, 32, 40, 11
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "mlp_ratio": 2.0},
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": 259,
        "width": 16,
        "heads": 2,
        "layers": 2,
        "mlp_ratio": 2.0,
    },
}
NAMES = ["tabby cat", "newt", "great white shark", "owl", "carp", "hen"]
TEMPLATES = ["a photo of a {c}.", "itap of the {c}.", "{c}"]
MARGIN = 1e-5  # of cosine similarities; above the rounding of float32


def tokenize(texts):
    """Bytes v as 1 + v between 257 and 258, padded with 0."""
    rows = [[257, *(1 + byte for byte in text.encode()), 258] for text in texts]
    assert max(map(len, rows)) <= CONTEXT
    return torch.tensor([row + [0] * (CONTEXT - len(row)) for row in rows])


def jpeg(rng):
    """JPEG of a few random colors, 30 to 80 pixels a side."""
    pixels = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize(tuple(rng.integers(30, 80, 2)), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=80)
    return buffer.getvalue()


def check_margins(query, gallery):
    """Check that the similarities at ranks k and k + 1 are not close."""
    ordered = -np.sort(-query @ gallery.T, axis=1)
    for k in KS:
        if k < ordered.shape[1]:
            assert (ordered[:, k - 1] - ordered[:, k]).min() > MARGIN, k


def main():
    rng = np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    model = open_clip.CLIP(**CONFIG)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point() and value.ndim:
                value += 0.3 * torch.randn(value.shape)
    model.eval()
    files = [jpeg(rng) for _ in range(IMAGES)]
    transform = image_transform(SIDE, is_train=False)
    images = torch.stack([transform(Image.open(io.BytesIO(data))) for data in files])
    labels = rng.integers(0, len(NAMES), IMAGES)
    captions = [[f"{rng.integers(1 << 30):x} {i}{j}" for j in range(1 + i % 3)] for i in range(IMAGES)]
    batches = [slice(0, 16), slice(16, IMAGES)]
    single = Loader([(images[rows], torch.tensor(labels[rows])) for rows in batches], NAMES)
    metrics = zeroshot_classification.evaluate(model, single, tokenize, NAMES, TEMPLATES, "cpu", amp=False)
    pairs = Loader([(images[rows], captions[rows]) for rows in batches])
    recall = zeroshot_retrieval.evaluate(model, pairs, tokenize, "cpu", amp=False, recall_k_list=list(KS))
    with torch.no_grad():
        image = model.encode_image(images, normalize=True).numpy()
        text = model.encode_text(tokenize([text for texts in captions for text in texts]), normalize=True).numpy()
        classifier = zeroshot_classification.zero_shot_classifier(
            model, tokenize, NAMES, TEMPLATES, "cpu", amp=False
        ).numpy()
    for query, gallery in ((image, text), (text, image), (image, classifier.T)):
        check_margins(query, gallery)
    texts = {"config": CONFIG, "names": NAMES, "templates": TEMPLATES, "captions": captions}
    texts |= {"labels": labels.tolist(), "metrics": metrics | recall}
    arrays = {f"weights/{name}": value.numpy() for name, value in model.state_dict().items()}
    arrays |= {f"jpeg/{i:02d}": np.frombuffer(data, np.uint8) for i, data in enumerate(files)}
    path = Path(__file__).with_name("open_clip_evaluation.npz")
    np.savez_compressed(path, texts=json.dumps(texts), image_features=image, **arrays)
    print(metrics | recall, path.stat().st_size)


if __name__ == "__main__":
    main()
