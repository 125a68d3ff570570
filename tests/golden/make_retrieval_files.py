"""Write retrieval/: files of text retrieval as BEIR, Sentence Transformers and Hugging Face datasets write them.

    pip install beir sentence-transformers datasets pytrec_eval-terrier torch
    python tests/golden/make_retrieval_files.py

Written with beir 2.2.0, sentence-transformers 6.2.0, datasets 5.2.0 and pytrec_eval-terrier 0.5.11.

`scores.json` has pytrec_eval's MRR and recall of rankings of passages, in which each document has the score of its best
passage.
"""

import json
from pathlib import Path

import numpy as np
import pytrec_eval
from beir.util import write_to_json, write_to_tsv
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from tokenizers import Tokenizer, models, pre_tokenizers

try:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
except ImportError:  # older releases
    from sentence_transformers.models import StaticEmbedding

OUTPUT = Path(__file__).with_name("retrieval")
OUTPUT.mkdir(exist_ok=True)
WORDS = [f"word{i}" for i in range(8)]

# BEIR: a query without judgments, a grade of 0, a passage that is not in the corpus and a title without a text.
corpus = {f"d{i}": {"title": f"Title {i}", "text": f"text of {word}" if i else ""} for i, word in enumerate(WORDS)}
queries = {f"q{i}": f"what is {word}?" for i, word in enumerate(WORDS[:4])}
qrels = {"q0": {"d0": 1, "d1": 0, "d2": 2}, "q1": {"d1": 1, "d3": 1}, "q2": {"gone": 1}}
write_to_json(str(OUTPUT / "beir_corpus.jsonl"), corpus)
write_to_json(str(OUTPUT / "beir_queries.jsonl"), queries)
write_to_tsv(str(OUTPUT / "beir_qrels.tsv"), qrels)

# Sentence Transformers: hard negatives of an untrained model, with the positive among the candidates.
vocabulary = {word: i for i, word in enumerate(["[UNK]", "about", "what", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
weights = np.random.default_rng(0).standard_normal((len(vocabulary), 8)).astype(np.float32)
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
pairs = Dataset.from_dict({"query": [f"what {w}" for w in WORDS], "answer": [f"about {w}" for w in WORDS]})
pairs = pairs.rename_columns({"query": "anchor", "answer": "positive"})
for output_format in ("triplet", "n-tuple", "labeled-pair", "labeled-list"):
    mined = mine_hard_negatives(pairs, model, num_negatives=2, output_format=output_format, verbose=False)
    mined.select(range(4)).to_json(OUTPUT / f"sentence_transformers_{output_format}.jsonl")

# Hugging Face datasets: fields that a row lacks are null.
rows = [
    {"query": "a", "pos": ["b"], "neg": ["c"]},
    {"query": "d", "pos": ["e"]},
    {"query": "f", "positive_passages": [{"docid": "1", "title": "g", "text": "h"}]},
    {"pos": ["i"]},
]
names = ("query", "pos", "neg", "positive_passages")
Dataset.from_list([{name: row.get(name) for name in names} for row in rows]).to_json(OUTPUT / "datasets.jsonl")

# Rankings of chunks: positions in a list of chunks, each with the id of its document.
rng = np.random.default_rng(0)
documents = [f"d{i}" for i in rng.integers(0, 10, 40)]
judged = {f"q{i}": {f"d{j}": int(rng.integers(0, 3)) for j in rng.choice(12, 4, replace=False)} for i in range(6)}
judged = {query: {"d0": 1} | grades for query, grades in judged.items()}
rankings, run = {}, {}
for query in judged:
    rankings[query] = rng.permutation(len(documents))[:25].tolist()
    run[query] = {}
    for rank, row in enumerate(rankings[query]):
        run[query].setdefault(documents[row], float(-rank))
scores = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank", "recall_1000"}).evaluate(run)
means = {name: float(np.mean([x[name] for x in scores.values()])) for name in ("recip_rank", "recall_1000")}
content = {"documents": documents, "judgments": judged, "rankings": rankings, "scores": means}
(OUTPUT / "scores.json").write_text(json.dumps(content) + "\n")
