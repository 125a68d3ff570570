"""Train DPR on one's own queries and passages, then answer a query.

    python docs/examples/dpr.py train.jsonl corpus.jsonl "who wrote faust?"

A line of `train.jsonl` is {"query": "...", "pos": ["..."], "neg": ["..."]}; hard negatives may be missing. A line of
`corpus.jsonl` is {"_id": "...", "text": "..."}. The start from BERT needs `pip install 'infcl_jax[hub]' tokenizers`.
"""

import json
import sys

import numpy as np

import infcl_jax


def settings(pairs: str) -> dict:
    """Return the settings of the run; all others have their defaults (docs/settings.md)."""
    return {
        "dataset": pairs,
        "loss": "retrieval",
        "model": "bert-base-uncased",
        "init": {"text": "hf-hub:google-bert/bert-base-uncased"},  # and its tokenizer
        "batch_size": 128,  # queries; each is compared with all passages of the batch
        "epochs": 40,
        "grad_cache": {"chunk_size": 16, "passage_chunk_size": 32},  # encoded at a time, so that 11 GB suffice
        "text_retrieval": {"hard_negatives": 1},
        "optimizer": {"learning_rate": 2e-5, "schedule": "linear", "warmup_steps": 0, "clip_norm": 2.0},
    }


def main(pairs: str, corpus: str, query: str, workdir: str = "runs/dpr") -> list[str]:
    """Train, and return the five best passages for the query."""
    infcl_jax.train(settings(pairs), workdir)
    encoder = infcl_jax.load(workdir)
    with open(corpus) as file:
        passages = [json.loads(line)["text"] for line in file]
    scores = encoder.encode_queries([query])[0] @ encoder.encode_passages(passages).T
    return [passages[row] for row in np.argsort(-scores)[:5]]


if __name__ == "__main__":  # data workers import the script
    print("\n".join(main(*sys.argv[1:])))
