"""Names of tensors of transformers' BERT and RoBERTa."""

from collections.abc import Collection, Mapping
from typing import Any

from infcl_jax.models.config import BertConfig
from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules

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
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise ValueError(f"expected hidden_act 'gelu' in a BERT text tower, got {activation!r}")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ValueError(f"expected position_embedding_type 'absolute' in a BERT text tower, got {positions!r}")
    pad_id = config.get("pad_token_id", 0)
    return BertConfig(
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp_ratio=config["intermediate_size"] / config["hidden_size"],
        activation="gelu",
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        token_types=config["type_vocab_size"],
        position_offset=0 if config["model_type"] == "bert" else pad_id + 1,
        pad_id=pad_id,
        context_length=text.context_length,
        pool=text.pool,
        projection=text.projection,
    )
