"""BERT and RoBERTa text towers by their names on the Hugging Face hub."""

import dataclasses
from typing import Any

from infcl_jax.models.config import BertConfig

_BASE: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12}
_LARGE: dict[str, Any] = {"width": 1024, "layers": 24, "heads": 16}
# RoBERTa counts positions from `pad_id + 1` (Liu et al. 2019; facts of the hub's config.json files).
_ROBERTA: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "max_positions": 514,
    "position_offset": 2,
    "token_types": 1,
    "pad_id": 1,
}

BERT_CONFIGS: dict[str, BertConfig] = {
    "bert-base-uncased": BertConfig(**_BASE, vocab_size=30522),
    "bert-base-cased": BertConfig(**_BASE, vocab_size=28996),
    "bert-base-multilingual-cased": BertConfig(**_BASE, vocab_size=119547),
    "bert-large-uncased": BertConfig(**_LARGE, vocab_size=30522),
    "bert-large-cased": BertConfig(**_LARGE, vocab_size=28996),
    "roberta-base": BertConfig(**_BASE, **_ROBERTA, vocab_size=50265),
    "roberta-large": BertConfig(**_LARGE, **_ROBERTA, vocab_size=50265),
    "xlm-roberta-base": BertConfig(**_BASE, **_ROBERTA, vocab_size=250002),
    "xlm-roberta-large": BertConfig(**_LARGE, **_ROBERTA, vocab_size=250002),
}


def bert_config(name: str, **changes: Any) -> BertConfig:
    """Return the configuration of a BERT or RoBERTa text tower.

    Args:
      name: name on the Hugging Face hub, with or without its owner, such as "bert-base-uncased".
      **changes: other values of the fields.

    Raises:
      ValueError: the name is unknown.
    """
    known = BERT_CONFIGS.get(name.rpartition("/")[2])
    if known is None:
        raise ValueError(f"expected one of {tuple(BERT_CONFIGS)}, got {name!r}; other text towers are not supported")
    return dataclasses.replace(known, activation="gelu", **changes)
