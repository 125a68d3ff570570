"""Golden token ids of transformers' BERT, T5 and SigLIP tokenizers.

This script also trains their vocabularies.

    PYTHONPATH=tests python tests/golden/make_transformers_tokens.py

Needs transformers, tokenizers, sentencepiece, protobuf and ftfy, but not PyTorch. The stored file is from transformers
5.23.0, tokenizers 0.23.3 and sentencepiece 0.2.3.
"""

import io
import re
import tempfile
import unicodedata
from pathlib import Path

import ftfy
import numpy as np
from golden import make_clip_tokens

PATH = Path(__file__).with_name("transformers_tokens.npz")
LENGTH = 32
COUNT = 1_000
_VOCAB_SIZE = 800
_FIRST = 300  # the captions before are lists of single characters


def bert_captions() -> list[str]:
    """Return 1,000 captions for BERT."""
    return make_clip_tokens.captions()[_FIRST : _FIRST + COUNT]


def _plain_captions() -> list[str]:
    """Return captions for SentencePiece.

    They exclude control characters, which transformers and SentencePiece normalize differently, and runs of a letter
    such as "www". These have several segmentations of equal probability, and each package picks its own.
    """
    texts = make_clip_tokens.captions()[_FIRST:]
    runs = re.compile(r"(.)\1\1")
    texts = [text for text in texts if text.isprintable() and not runs.search(unicodedata.normalize("NFKC", text))]
    return [text for text in texts if "<" not in text]


def t5_captions() -> list[str]:
    """Return 1,000 captions for T5."""
    return _plain_captions()[:COUNT]


def siglip_captions() -> list[str]:
    """Return 1,000 captions that SigLIP's original cleaning and that of transformers change alike."""
    texts = [text for text in _plain_captions() if "&" not in text and "_" not in text]
    return [text for text in texts if ftfy.fix_text(text) == text][:COUNT]


def _train_wordpiece(texts: list[str]) -> dict[str, int]:
    """Train BERT's vocabulary."""
    import tokenizers

    trained = tokenizers.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, _VOCAB_SIZE, min_frequency=1, limit_alphabet=300, show_progress=False)
    return trained.get_vocab()


def _train_sentence_piece(texts: list[str]) -> bytes:
    """Train a unigram model with T5's special tokens."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in texts if text.isascii()] + list(make_clip_tokens.UNICODE)),
        model_writer=model,
        vocab_size=_VOCAB_SIZE,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _digests(tokenizer, texts: list[str]) -> np.ndarray:
    ids = tokenizer(texts, max_length=LENGTH, padding="max_length", truncation=True).input_ids
    return make_clip_tokens.digests(np.array(ids))


def main() -> None:
    """Train the vocabularies, run transformers and write the golden file."""
    from transformers import BertTokenizer, SiglipTokenizer, T5Tokenizer

    texts = bert_captions()
    model = _train_sentence_piece(texts)
    with tempfile.TemporaryDirectory() as folder:
        bert = BertTokenizer(_train_wordpiece(texts))
        bert.save_pretrained(folder)
        json = (Path(folder) / "tokenizer.json").read_bytes()
        config = (Path(folder) / "tokenizer_config.json").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spiece.model"
        path.write_bytes(model)
        t5 = T5Tokenizer.from_pretrained(folder, extra_ids=0)
        siglip = SiglipTokenizer(str(path))
    np.savez_compressed(
        PATH,
        bert_json=np.frombuffer(json, np.uint8),
        bert_config=np.frombuffer(config, np.uint8),
        sentence_piece=np.frombuffer(model, np.uint8),
        bert=_digests(bert, texts),
        t5=_digests(t5, t5_captions()),
        siglip=_digests(siglip, siglip_captions()),
    )


if __name__ == "__main__":
    main()
