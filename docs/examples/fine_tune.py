"""Fine-tune a checkpoint of OpenCLIP on a folder of images, then search the folder with a text.

    python docs/examples/fine_tune.py photos "a dog on a beach"

`photos` holds images with a table `captions.csv` of the columns `path` and `caption`, or tar files of webdataset.
Loading the checkpoint needs `pip install -e '.[hub]'` and `pip install --no-deps clip-anytorch`.
"""

import sys

import infcl_jax
from infcl_jax.data import load_source
from infcl_jax.evaluation import read_features, top_k


def settings(photos: str) -> dict:
    """Return the settings of the run; all others have their defaults (docs/settings.md)."""
    return {
        "dataset": photos,
        "split": "train[:90%]",
        "init": {"model": "ViT-B-32:laion2b_s34b_b79k"},  # brings model and tokenizer
        "batch_size": 512,
        "epochs": 5,
        # A tenth of the rate of training from scratch or less, and lower layers change less than upper ones.
        "optimizer": {"learning_rate": 1e-5, "warmup_steps": 100, "layer_decay": (0.75, 1.0), "clip_norm": 1.0},
        "eval_every": 500,
        "evaluation": {"retrieval_dataset": photos, "retrieval_split": "train[90%:]"},
        "export": True,  # also for open_clip: create_model_and_transforms("local-dir:runs/tuned/exported")
    }


def main(photos: str, query: str, workdir: str = "runs/tuned") -> list[str]:
    """Train, encode all images, and return the names of the ten nearest to the query."""
    infcl_jax.train(settings(photos), workdir)
    encoder = infcl_jax.load(workdir)
    infcl_jax.embed(encoder, load_source(photos, "train"), f"{workdir}/photos.safetensors")
    images = read_features(f"{workdir}/photos.safetensors")
    _, index = top_k(encoder.encode_texts([query]), images.feature, min(10, len(images.key)))
    return [images.key[row] for row in index[0]]


if __name__ == "__main__":  # data workers import the script
    print("\n".join(main(*sys.argv[1:])))
