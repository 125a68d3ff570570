"""Names of tensors of transformers' BERT and RoBERTa."""

from collections.abc import Collection, Mapping
from typing import Any

from infcl_jax.models.config import BertConfig
from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules, module_rules
from infcl_jax.models.json_section import LARGEST_DEPTH, Section

KINDS = ("bert", "roberta", "xlm-roberta")  # model_type in config.json

# Heads of pretraining, and buffers of older versions.
_UNUSED = r"(cls|lm_head)\..*|.*\.position_ids|.*embeddings\.token_type_ids"
# Names of Google's checkpoints, such as bert-base-uncased.
_LEGACY = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def rules(prefix: str) -> tuple[Rule, ...]:
    """Return the rules of a BERT text tower without its projection, which transformers' BERT does not have."""
    embeddings = f"{prefix}embeddings"
    block, layer = r"text/transformer/block_0*(\d+)", f"{prefix}encoder.layer.{{0}}"
    projections = (f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))
    return (
        Rule(r"params/text/token_embedding", (f"{embeddings}.word_embeddings.weight",)),
        Rule(r"params/text/positional_embedding", (f"{embeddings}.position_embeddings.weight",)),
        Rule(r"params/text/token_type_embedding", (f"{embeddings}.token_type_embeddings.weight",)),
        *module_rules("text/ln_embed", f"{embeddings}.LayerNorm"),
        *module_rules("text/pooler", f"{prefix}pooler.dense"),
        *module_rules(f"{block}/attn/in_proj", *projections),
        *module_rules(f"{block}/attn/out_proj", f"{layer}.attention.output.dense"),
        *module_rules(f"{block}/ln_1", f"{layer}.attention.output.LayerNorm"),
        *module_rules(f"{block}/mlp/c_fc", f"{layer}.intermediate.dense"),
        *module_rules(f"{block}/mlp/c_proj", f"{layer}.output.dense"),
        *module_rules(f"{block}/ln_2", f"{layer}.output.LayerNorm"),
    )


def weight_map(text: BertConfig, shapes: Mapping[str, Any], names: Collection[str]) -> WeightMap:
    """Map the parameters of a text tower, without its projection to features, to transformers' BERT.

    The prefix begins the names of the source's tensors: "bert.", "roberta." or none.
    """
    table = "embeddings.word_embeddings.weight"
    prefix = next((name.removesuffix(table) for name in names if name.endswith(table)), "")
    pooler = "" if text.pool == "pooler" else r"|(.*\.)?pooler\.dense\..*"
    entries = match_rules(rules(prefix), shapes)
    if any(name.endswith("LayerNorm.gamma") for name in names):
        for current, legacy in _LEGACY.items():
            entries = tuple(e._replace(names=tuple(name.replace(current, legacy) for name in e.names)) for e in entries)
    return WeightMap(entries, _UNUSED + pooler, {})


def read_config(config: Mapping[str, Any], text: BertConfig) -> BertConfig:
    """Read the configuration of a BERT of transformers from `config.json`.

    Context length, pool and projection, which the file does not have, are taken from `text`.

    Raises:
      ValueError: the model has a field that is not supported.
    """
    fields = Section("", config)
    kind = fields.choice("model_type", dict(zip(KINDS, KINDS, strict=True)), None)
    fields.choice("hidden_act", {"gelu": "gelu"}, "gelu")
    fields.choice("position_embedding_type", {"absolute": "absolute"}, "absolute")
    width, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    pad_id = 0 if fields.get("pad_token_id") is None else fields.index("pad_token_id", 0, vocab_size)
    return BertConfig(
        width=width,
        layers=fields.count("num_hidden_layers", largest=LARGEST_DEPTH),
        heads=fields.count("num_attention_heads"),
        mlp_ratio=fields.count("intermediate_size") / width,
        activation="gelu",
        norm_epsilon=fields.number("layer_norm_eps", 1e-12, 0, 1),
        vocab_size=vocab_size,
        max_positions=fields.count("max_position_embeddings"),
        token_types=fields.count("type_vocab_size"),
        position_offset=0 if kind == "bert" else pad_id + 1,
        pad_id=pad_id,
        context_length=text.context_length,
        pool=text.pool,
        projection=text.projection,
    )
