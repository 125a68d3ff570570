"""DPR: dense passage retrieval on a file of yours or on Natural Questions, with GradCache's sub-batches.

    python -m experiments.train --config=configs/dpr.py --workdir=runs/mine --config.dataset=train.jsonl
    python -m experiments.train --config=configs/dpr.py:tiny --workdir=runs/small --config.dataset=train.jsonl
    python -m experiments.train --config=configs/dpr.py:nq --workdir=runs/dpr
    python -m experiments.train --config=configs/dpr.py:nq,gpus=8 --workdir=runs/dpr8
    python -m experiments.train --config=configs/dpr.py:query_chunk=32,passage_chunk=16 --workdir=runs/large_chunks

The argument is a list of changes:

- `nq`: data, warm-up and evaluation of Natural Questions.
- `tiny`: a BERT of two layers over bytes, with random weights, 16 questions a batch and 10 epochs. It needs neither a
  GPU nor a download, to try a file in a minute.
- `gpus`: GPUs that train. The batch of 128 questions is global, so one GPU trains what DPR's eight do: only the
  sub-batches of gradient caching differ. 1 by default; with 8, gradient caching is off, as in DPR.
- `query_chunk`, `passage_chunk`: rows encoded at a time on each GPU, 16 and 8 by default, GradCache's sub-batches for a
  GPU of 11 GB.

Weights and tokenizer of BERT come from the Hub, `google-bert/bert-base-uncased` (extra `hub`). Without a connection,
give a folder with its `config.json`, `model.safetensors` and `tokenizer.json` as `--config.init.text`. For a BERT of
another size, the error gives the `model_overrides` that it needs.

| data of `nq`, in the folder `data/dpr` | origin |
| --- | --- |
| `biencoder-nq-train.json` | DPR's resource data.retriever.nq-train, 58,880 questions |
| `psgs_w100.tsv` | data.wikipedia_split.psgs_w100, 21 million passages |
| `nq-test.qa.csv` | data.retriever.qas.nq-test, 3,610 questions |

Expected top-20 and top-100 accuracy on the test questions, in %:

| paper | GPUs | top-20 | top-100 | time |
| --- | --- | --- | --- | --- |
| DPR | 8 | 78.4 | 85.4 | about a day |
| GradCache | 1 (11 GB) | 79.9 | 86.1 | 40 hours |

The accuracy is measured once, at the end. DPR trained in fp32, GradCache in mixed precision; here that is
`--config.precision=bf16`. Times are those of the papers; this recipe has not been run at full size. A data file in
tevatron's layout needs no other setting. To evaluate a file of yours, set a corpus and questions; for MS MARCO and BEIR
also `text_retrieval.judgments`:

    python -m experiments.train --config=configs/dpr.py --workdir=runs/marco --config.dataset=train.jsonl \\
        --config.text_retrieval.corpus=collection.tsv --config.text_retrieval.questions=queries.dev.small.tsv \\
        --config.text_retrieval.judgments=qrels.dev.small.tsv

Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering" (2020), section 5 and its code's
`biencoder_nq.yaml`; Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021),
section 4.
"""

from ml_collections import ConfigDict

from configs import base
from infcl_jax.settings import parse_overrides

_PAPER_GPUS = 8  # of 32 GB, which need no gradient caching
_VARIANTS = ("nq", "tiny")


def get_config(changes: str = "") -> ConfigDict:
    """Return DPR's settings; `docs/settings.md` explains them.

    Args:
      changes: such as "nq,gpus=1,query_chunk=32", see above.

    Raises:
      ValueError: a change is unknown.
    """
    options = {"gpus": 1, "query_chunk": 16, "passage_chunk": 8}
    names = [name for name in changes.split(",") if name]
    variants = [name for name in names if name in _VARIANTS]
    for name, value in parse_overrides(",".join(name for name in names if name not in _VARIANTS)).items():
        if name not in options or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"expected nq, tiny, or gpus, query_chunk or passage_chunk as a positive number, got {name}={value!r}"
            )
        options[name] = value
    config = base.get_config()
    config.dataset = "train.jsonl"
    config.model = "bert-base-uncased"  # two encoders, the states of [CLS], dropout 0.1, 256 tokens
    config.precision = "fp32"
    config.init.text = "hf-hub:google-bert/bert-base-uncased"  # and the tokenizer
    config.loss = "retrieval"
    config.text_retrieval.hard_negatives = 1
    config.text_retrieval.separator = " [SEP] "
    config.batch_size = 128
    config.epochs = 40
    if options["gpus"] < _PAPER_GPUS:
        config.grad_cache.chunk_size = options["query_chunk"] * options["gpus"]
        config.grad_cache.passage_chunk_size = options["passage_chunk"] * options["gpus"]
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 0  # a small file has fewer steps than DPR's warm-up
    config.optimizer.schedule = "linear"
    config.optimizer.weight_decay = 0.0
    config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps = 0.9, 0.999, 1e-8
    config.optimizer.clip_norm = 2.0
    config.evaluation.batch_size = 1024
    config.eval_every = 0
    config.checkpoint_every = 460  # steps of an epoch of Natural Questions
    if "nq" in variants:
        _use_natural_questions(config)
    if "tiny" in variants:
        _shrink(config)
    return config


def _use_natural_questions(config: ConfigDict) -> None:
    config.dataset = "data/dpr/biencoder-nq-train.json"
    config.text_retrieval.corpus = "data/dpr/psgs_w100.tsv"
    config.text_retrieval.questions = "data/dpr/nq-test.qa.csv"
    config.optimizer.warmup_steps = 1237


def _shrink(config: ConfigDict) -> None:
    config.model, config.model_overrides = "bert-tiny", "text.context_length=256"  # bytes
    config.init.text = None
    config.text_retrieval.separator = " "
    config.batch_size, config.epochs = 16, 10
    config.grad_cache.chunk_size = config.grad_cache.passage_chunk_size = None
    config.optimizer.learning_rate = 1e-3
