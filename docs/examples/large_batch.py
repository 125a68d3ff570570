"""Train ViT-B/32 with 32,768 pairs a batch on one GPU of 80 GB, by gradient caching.

    python docs/examples/large_batch.py 'shards/{00000..00331}.tar'

The loss is over all 32,768 pairs, exactly; `chunk_size` only bounds how many are encoded at a time. OpenCLIP trains the
same way with a batch of 2,048 and `--accum-freq=16`.
"""

import sys

import infcl_jax


def settings(shards: str) -> dict:
    """Return the settings of the run; all others have their defaults (docs/settings.md)."""
    return {
        "dataset": shards,
        "model": "ViT-B/32",
        "batch_size": 32_768,
        "grad_cache": {
            "chunk_size": 2048,
            "keep": -1,  # stores the activations of as many chunks as fit, instead of recomputing them
        },
        "epochs": 30,
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.2, "beta2": 0.98, "warmup_steps": 1000},
        "checkpoint_every": 500,
    }


if __name__ == "__main__":  # data workers import the script
    infcl_jax.train(settings(*sys.argv[1:]), "runs/large_batch")
