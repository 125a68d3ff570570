"""Golden token ids of published kinds of tokenizers, by OpenCLIP's `HFTokenizer` and by transformers.

    PYTHONPATH=tests python tests/golden/make_pretrained_tokens.py

This script also trains their vocabularies, which are small and have no table of Unicode normalization.

Needs transformers, tokenizers, sentencepiece, protobuf, ftfy and open_clip_torch, but not PyTorch. The stored file is
from open_clip_torch 3.3.0, transformers 5.24.0, tokenizers 0.23.3 and sentencepiece 0.2.3.
"""

import importlib.util
import io
import json
import shutil
import string
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("pretrained_tokens.npz")
LENGTH = 12
TEXTS = (
    "A photo of a Cat.",
    "a photo of a cat",
    "An IMAGE, of two dogs!",
    "T-shirt (red)  on a\tbicycle",
    "",
    "Don't stop_it, cat.",
    "&amp; html &lt;b&gt;",
    "  “two” dogs",
    "Café 照片",
    "a very long caption of a skyscraper in a harbour, with a lighthouse and a giraffe next to the motherboard",
)


def _open_clip_tokenizer() -> type:
    """Return OpenCLIP's `HFTokenizer`, on NumPy in place of PyTorch."""
    torch = types.ModuleType("torch")
    torch.where, torch.zeros_like, torch.Tensor, torch.LongTensor = np.where, np.zeros_like, np.ndarray, np.ndarray
    sys.modules["torch"] = torch
    path = Path(importlib.util.find_spec("open_clip").origin).with_name("tokenizer.py")
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["torch"]

    class OnNumPy(module.HFTokenizer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            tokenizer = self.tokenizer

            class Wrapped:
                sep_token_id = tokenizer.sep_token_id

                def __call__(self, texts, **options):
                    return tokenizer(texts, **options | {"return_tensors": "np"})

            self.tokenizer = Wrapped()

    return OnNumPy


def _sentence_piece() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, *(text.lower() for text in TEXTS)] * 4),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _bert_vocabulary() -> dict[str, int]:
    letters = sorted({letter for text in TEXTS for letter in text if letter.strip()} | set(string.ascii_lowercase))
    words = ["a", "photo", "of", "cat", "Cat", "dogs", "IMAGE", "image"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def _gemma(folder: Path) -> None:
    """Write a tokenizer of Gemma's kind, which keeps the case, with the configuration that SigLIP 2 publishes."""
    from transformers import GemmaTokenizer

    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "▁",
        *string.ascii_letters,
    ]
    merges = [("▁", "a"), ("c", "a"), ("o", "f"), ("▁", "of"), ("p", "h"), ("A", "▁")]
    pieces += [*".,!()-\t", *("".join(merge) for merge in merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=False, add_eos_token=True)
    tokenizer.save_pretrained(folder)
    _configure(folder, do_lower_case=True, padding_side="right")


def _configure(folder: Path, *removed: str, **changes) -> None:
    """Change the configuration of a tokenizer."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in removed}))


def _content(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model", "config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def main() -> None:
    """Write the files of each tokenizer and its ids."""
    from transformers import AutoTokenizer, BertTokenizer, SiglipTokenizer, T5Tokenizer
    from transformers.models.siglip2.tokenization_siglip2 import Siglip2Tokenizer

    open_clip, sentence_piece, bert_vocabulary = _open_clip_tokenizer(), _sentence_piece(), _bert_vocabulary()
    arrays: dict[str, np.ndarray] = {}

    def record(case: str, folder: Path, ids, text_cfg: dict | None = None) -> None:
        files = _content(folder)
        if text_cfg is not None:
            files["text_cfg"] = json.dumps(text_cfg).encode()
        arrays.update({f"{case}/{name}": np.frombuffer(content, np.uint8) for name, content in files.items()})
        arrays[f"{case}/ids"] = np.asarray(ids, np.int32)

    def encode(tokenizer) -> np.ndarray:
        options = {"max_length": LENGTH, "padding": "max_length", "truncation": True}
        return np.array(tokenizer(list(TEXTS), **options).input_ids)

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "spiece.model").write_bytes(sentence_piece)
        cases = ("t5", "siglip", "bert", "cased", "gemma", "accents", "left", "default", "fast", "type")
        folders = {case: root / case for case in cases}
        for folder in folders.values():
            folder.mkdir()
        (folders["t5"] / "spiece.model").write_bytes(sentence_piece)
        T5Tokenizer.from_pretrained(folders["t5"], extra_ids=0, pad_token="</s>").save_pretrained(folders["t5"])
        (folders["t5"] / "spiece.model").unlink(missing_ok=True)
        SiglipTokenizer(str(root / "spiece.model"), pad_token="</s>").save_pretrained(folders["siglip"])
        BertTokenizer(bert_vocabulary).save_pretrained(folders["bert"])
        BertTokenizer(bert_vocabulary, do_lower_case=False).save_pretrained(folders["cased"])
        accents = {"strip_accents": False, "tokenize_chinese_chars": False}
        BertTokenizer(bert_vocabulary, **accents).save_pretrained(folders["accents"])
        BertTokenizer(bert_vocabulary).backend_tokenizer.save(str(folders["accents"] / "tokenizer.json"))
        BertTokenizer(bert_vocabulary, padding_side="left").save_pretrained(folders["left"])
        for case in ("default", "fast", "type"):
            shutil.copytree(folders["cased"], folders[case], dirs_exist_ok=True)
        _configure(folders["default"], "do_lower_case")
        _configure(folders["fast"], tokenizer_class="PreTrainedTokenizerFast", do_lower_case=True)
        _configure(folders["type"], "do_lower_case", "tokenizer_class")
        (folders["type"] / "config.json").write_text('{"model_type": "bert"}')
        _gemma(folders["gemma"])
        for case, folder, text_cfg in (
            ("open_clip_siglip", "t5", {"tokenizer_kwargs": {"clean": "canonicalize"}}),
            ("open_clip_clipa", "bert", {"tokenizer_kwargs": {"strip_sep_token": True}}),
            ("open_clip_bert", "cased", {}),
            ("open_clip_lower", "cased", {"tokenizer_kwargs": {"clean": "lower"}}),
        ):
            options = text_cfg.get("tokenizer_kwargs", {})
            ids = open_clip(str(folders[folder]), context_length=LENGTH, **options)(list(TEXTS))
            record(case, folders[folder], ids, text_cfg | {"hf_tokenizer_name": "owner/name"})
        record("hf_siglip", folders["siglip"], encode(AutoTokenizer.from_pretrained(folders["siglip"])))
        record("hf_siglip2", folders["gemma"], encode(Siglip2Tokenizer.from_pretrained(folders["gemma"])))
        _configure(folders["gemma"], "padding_side", tokenizer_class="Siglip2Tokenizer")
        record("hf_siglip2_left", folders["gemma"], encode(Siglip2Tokenizer.from_pretrained(folders["gemma"])))
        for case in ("cased", "accents", "left", "default", "fast", "type"):
            record(f"hf_bert_{case}", folders[case], encode(AutoTokenizer.from_pretrained(folders[case])))
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
