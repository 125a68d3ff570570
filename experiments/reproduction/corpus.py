"""A generated text corpus in DPR's layout: questions about attributes of invented names.

Each name has a passage for each of four attributes. The positive passage of a question has the answer, and the hard
negative is another attribute of the same name.
"""

import json
from pathlib import Path

import numpy as np

_NAMES = 256
_ATTRIBUTES = ("height", "age", "origin", "trade")


def write_corpus(folder: Path, seed: int = 0) -> dict[str, str]:
    """Write `train.json`, `corpus.tsv` and `questions.csv`.

    Returns:
      Settings of a run on the corpus, by name.
    """
    rng = np.random.default_rng(seed)

    def word(length: int) -> str:
        return "".join(chr(97 + letter) for letter in rng.integers(0, 26, length))

    names = [word(5) for _ in range(_NAMES)]
    facts = {name: {attribute: word(4) for attribute in _ATTRIBUTES} for name in names}

    def passage(name: str, attribute: str) -> dict[str, str]:
        return {"title": name, "text": f"{attribute} {facts[name][attribute]}"}

    records, lines = [], ["id\ttext\ttitle"]
    for name in names:
        asked, other = rng.choice(_ATTRIBUTES, 2, replace=False)
        records.append(
            {
                "question": f"{asked} of {name}",
                "answers": [facts[name][asked]],
                "positive_ctxs": [passage(name, asked)],
                "hard_negative_ctxs": [passage(name, other)],
            }
        )
        lines += [f"{len(lines) + i}\t{passage(name, a)['text']}\t{name}" for i, a in enumerate(_ATTRIBUTES)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(json.dumps(records))
    (folder / "corpus.tsv").write_text("\n".join(lines) + "\n")
    questions = "".join(f"{r['question']}\t{r['answers']!r}\n" for r in records)
    (folder / "questions.csv").write_text(questions)
    return {
        "dataset": str(folder / "train.json"),
        "text_retrieval.corpus": str(folder / "corpus.tsv"),
        "text_retrieval.questions": str(folder / "questions.csv"),
    }
