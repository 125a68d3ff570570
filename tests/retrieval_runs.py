"""Data and settings of small runs of dense text retrieval."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import oracle
import runs

from infcl_jax import run
from infcl_jax.settings import make_config
from infcl_jax.training import Checkpointer, prepare_workdir, save_config

TOPICS = 48
BATCH = 16
MODEL = "text.layers=1,text.context_length=24"


def write_corpus(folder, seed=0):
    """Write training data, a corpus and questions; a hard negative has the question's words without its answer."""
    rng = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 4)) for _ in range(TOPICS)]
    answers = ["".join(chr(65 + c) for c in rng.integers(0, 26, 3)) for _ in range(TOPICS)]
    kinds = ("tall", "old")

    def passage(topic, kind):
        return {"title": words[topic], "text": f"{kind} {answers[topic] if kind == kinds[0] else 'none'}"}

    train, corpus = [], ["id\ttext\ttitle"]
    for topic in range(TOPICS):
        train.append(
            {
                "question": f"how tall {words[topic]}",
                "answers": [answers[topic]],
                "positive_ctxs": [passage(topic, "tall")],
                "hard_negative_ctxs": [passage(topic, "old")] if topic else [],
            }
        )
        corpus += [f"{2 * topic + i}\t{passage(topic, k)['text']}\t{words[topic]}" for i, k in enumerate(kinds)]
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "corpus.tsv").write_text("\n".join(corpus) + "\n")
    (folder / "qa.csv").write_text("".join(f"{r['question']}\t{r['answers']!r}\n" for r in train))
    return folder


def settings(folder, **changes):
    return make_config(
        {
            "dataset": str(folder / "train.json"),
            "model": "bert-tiny",
            "model_overrides": MODEL,
            "loss": "retrieval",
            "batch_size": BATCH,
            "total_steps": 2,
            "num_workers": 0,
            "num_threads": 1,
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.0,
            "text_retrieval.corpus": str(folder / "corpus.tsv"),
            "text_retrieval.questions": str(folder / "qa.csv"),
        }
        | changes
    )


def save(workdir, config):
    """Save an untrained run."""
    state = run.initial_state(config, oracle.mesh_of(1))
    save_config(prepare_workdir(workdir), config.to_dict())
    run.text_tokenizer(config).save(workdir / run.TOKENIZER_FOLDER)
    with Checkpointer(workdir) as checkpoints:
        checkpoints.save(1, state, runs.NoData())
    return state


@functools.cache
def initial(model_overrides, batch_size=BATCH, learning_rate=0.1, ema_decay=None):
    """Initial state on the host, for SGD without momentum."""
    sgd = {"optimizer.name": "sgd", "optimizer.learning_rate": learning_rate, "optimizer.schedule": "constant"}
    changes = {"model_overrides": model_overrides, "batch_size": batch_size, "ema_decay": ema_decay}
    config = settings(Path(), **changes, **sgd, **{"optimizer.beta1": 0.0})
    return jax.device_get(run.initial_state(config, oracle.mesh_of(1)))
