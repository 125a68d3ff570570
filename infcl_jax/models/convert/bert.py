"""Names of tensors of transformers' BERT and RoBERTa."""

from collections.abc import Collection, Mapping
from typing import Any

from infcl_jax.models.config import BertConfig
from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules
from infcl_jax.models.json_section import LARGEST_DEPTH, Section

KINDS = ("bert", "roberta", "xlm-roberta")  # model_type in config.json

# Heads of pretraining, and buffers of older versions.
_UNUSED = r"(cls|lm_head)\..*|.*\.position_ids|.*embeddings\.token_type_ids"
_MODULES = {
    "attn/out_proj": "attention.output.dense",
    "ln_1": "attention.output.LayerNorm",
    "mlp/c_fc": "intermediate.dense",
    "mlp/c_proj": "output.dense",
    "ln_2": "output.LayerNorm",
}


def rules(text: Any, prefix: str, norm: tuple[str, str] = ("weight", "bias")) -> tuple[Rule, ...]:
    """Return the rules of a BERT text tower; none for other towers.

    The projection to features is not part of transformers' BERT.

    Args:
      text: configuration of the tower.
      prefix: prefix of all names.
      norm: names of scale and bias of a LayerNorm.
    """
    if not isinstance(text, BertConfig):
        return ()
    block, target = r"params/text/transformer/block_0*(\d+)", f"{prefix}encoder.layer.{{0}}"
    projections = [f"{target}.attention.self.{name}" for name in ("query", "key", "value")]
    modules = {"params/text/ln_embed": f"{prefix}embeddings.LayerNorm", "params/text/pooler": f"{prefix}pooler.dense"}
    modules |= {f"{block}/{path}": f"{target}.{name}" for path, name in _MODULES.items()}
    tower_rules = [
        Rule(r"params/text/token_embedding", (f"{prefix}embeddings.word_embeddings.weight",)),
        Rule(r"params/text/positional_embedding", (f"{prefix}embeddings.position_embeddings.weight",)),
        Rule(r"params/text/token_type_embedding", (f"{prefix}embeddings.token_type_embeddings.weight",)),
        Rule(rf"{block}/attn/in_proj/kernel", tuple(f"{name}.weight" for name in projections)),
        Rule(rf"{block}/attn/in_proj/bias", tuple(f"{name}.bias" for name in projections)),
    ]
    for path, name in modules.items():
        weight, bias = norm if name.endswith("LayerNorm") else ("weight", "bias")
        tower_rules += [
            Rule(f"{path}/(?:kernel|scale)", (f"{name}.{weight}",)),
            Rule(f"{path}/bias", (f"{name}.{bias}",)),
        ]
    return tuple(tower_rules)


def weight_map(text: BertConfig, shapes: Mapping[str, Any], names: Collection[str]) -> WeightMap:
    """Map the parameters of a text tower to transformers' BERT.

    Args:
      text: configuration of the tower.
      shapes: arrays or shapes of the tower by path, without its projection to features.
      names: tensors of the source, whose prefix is "bert.", "roberta." or none.
    """
    table = "embeddings.word_embeddings.weight"
    prefix = next((name.removesuffix(table) for name in names if name.endswith(table)), "")
    pooler = "" if text.pool == "pooler" else r"|(.*\.)?pooler\.dense\..*"
    # Names of Google's checkpoints, such as that of bert-base-uncased.
    legacy = any(name.endswith("LayerNorm.gamma") for name in names)
    entries = match_rules(rules(text, prefix, ("gamma", "beta") if legacy else ("weight", "bias")), shapes)
    return WeightMap(entries, _UNUSED + pooler, {})


def read_config(config: Mapping[str, Any], text: BertConfig) -> BertConfig:
    """Read the configuration of a BERT of transformers.

    Args:
      config: content of `config.json`, with one of `KINDS` as its model_type.
      text: configuration with context length, pool and projection, which the file does not have.

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
