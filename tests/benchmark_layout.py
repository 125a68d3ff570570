"""Small benchmarks in the webdataset layout of clip_benchmark, and in Karpathy's."""

import io
import json

import captioned
import numpy as np

NAMES = ("cat", "dog", "sea lion", "owl", "newt", "carp")
TEMPLATES = ("a photo of a {c}.", "itap of the {c}")


def write_benchmark(folder, samples, *, kind=None, shards=2, split="test"):
    """Write samples, a list of {extension: bytes}, to tar files with class names and templates."""
    (folder / split).mkdir(parents=True)
    for shard in range(shards):
        rows = range(shard, len(samples), shards)
        members = [(f"s{i:04d}.{name}", data) for i in rows for name, data in samples[i].items()]
        captioned.write_tar(folder / split / f"{shard}.tar", members)
    (folder / split / "nshards.txt").write_text(f"{shards}\n")
    if kind is not None:
        (folder / "dataset_type.txt").write_text(f"{kind}\n")
    if kind != "retrieval":
        (folder / "classnames.txt").write_text("\n".join(NAMES) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    return folder


def classified(labels, arrays=None):
    """Samples with a label, and with an npy member if there are arrays."""
    samples = [{"cls": str(label).encode(), "jpg": captioned.jpeg(i)} for i, label in enumerate(labels)]
    for sample, array in zip(samples, [] if arrays is None else arrays, strict=False):
        sample["npy"] = npy(array)
    return samples


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return buffer.getvalue()


def write_karpathy(folder, rows, name="dataset_coco.json"):
    """Write images and captions; `rows` are (split, folder of the image or None, captions)."""
    images = []
    for number, (split, filepath, texts) in enumerate(rows):
        parent = folder / (filepath or "")
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f"{number}.jpg").write_bytes(captioned.jpeg(number))
        image = {"filename": f"{number}.jpg", "split": split, "sentences": [{"raw": text} for text in texts]}
        images.append(image | ({"filepath": filepath} if filepath else {}))
    (folder / name).write_text(json.dumps({"dataset": "coco", "images": images}))
    return folder / name
