"""Small vocabularies of each kind of tokenizer."""

import numpy as np
import pytest
from golden import make_transformers_tokens as golden

MERGES = "#version: 0.2\nt h\nth e</w>\nc a\nca t</w>\nr e\nre d</w>\n"


@pytest.fixture(scope="session")
def specs(tmp_path_factory):
    """Spec of a small tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("vocabularies")
    with np.load(golden.PATH) as stored:
        (folder / "tokenizer.json").write_bytes(stored["bert_json"].tobytes())
        (folder / "spiece.model").write_bytes(stored["sentence_piece"].tobytes())
    (folder / "merges.txt").write_text(MERGES)
    return {
        "bytes": "bytes",
        "clip": f"clip:{folder / 'merges.txt'}",
        "hf": f"hf:{folder}",
        "sentencepiece": f"sentencepiece:{folder / 'spiece.model'}",
    }
