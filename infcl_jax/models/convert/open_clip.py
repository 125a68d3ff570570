"""OpenCLIP's names of tensors."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from infcl_jax.models.config import BertConfig, CLIPConfig, VisionConfig
from infcl_jax.models.convert import bert
from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules, module_rules
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.models.vit import sin_cos_positions

WEIGHT_FILES = (
    "open_clip_model.safetensors",
    "open_clip_model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pt",
)

COUNTERS = "counters"  # collection of variables, by name of the tensor
_UNUSED = r".*\.num_batches_tracked|(.*\.)?attn_mask|.*\.position_ids|input_resolution|context_length|vocab_size"
_OPENAI = ("input_resolution", "context_length", "vocab_size")  # in the state dicts of OpenAI alone
_TIMM_HEAD = "visual.trunk.head.weight"  # timm's own classifier, in place of OpenCLIP's projection


def weight_map(config: CLIPConfig, shapes: Mapping[str, Any], names: Collection[str]) -> WeightMap:
    """Map the parameters of a model to OpenCLIP's tensors.

    The names of a source's tensors tell its variants apart. For an export they are "text." or none, see
    `needs_custom_text`.

    Raises:
      ValueError: OpenCLIP has no such parameter.
    """
    text = "text." if any(name.startswith("text.") for name in names) else ""
    projection = Rule(r"params/text/text_projection/kernel", (f"{text}text_projection",), "same")
    if isinstance(config.text, BertConfig):
        projection = Rule(projection.pattern, ("text.proj.weight",))
    elif "params/text/text_projection/bias" in shapes:
        projection = Rule(projection.pattern, (f"{text}text_projection.weight",))
    rules = (
        Rule(rf"{COUNTERS}/(.*)", ("{0}",)),
        Rule(r"params/(logit_scale|logit_bias)", ("{0}",), "scalar"),
        *(_timm_rules(_TIMM_HEAD in names) if is_timm(config.vision) else ()),
        *(bert.rules("text.transformer.") if isinstance(config.text, BertConfig) else ()),
        Rule(r"params/text/text_projection/fc1/kernel", ("text.proj.0.weight",)),
        Rule(r"params/text/text_projection/fc2/kernel", ("text.proj.2.weight",)),
        Rule(r"params/visual/proj/kernel", ("visual.proj",), "same"),
        projection,
        Rule(r"params/text/token_embedding", (f"{text}token_embedding.weight",)),
        *_resnet_rules(),
        *_tower_rules("visual", "visual."),
        *_tower_rules("text", text),
    )
    entries = match_rules(rules, shapes)
    means = [entry.names[0] for entry in entries if entry.names[0].endswith(".running_mean")]
    buffers = {name.replace("running_mean", "num_batches_tracked"): np.array(0, np.int64) for name in means}
    return WeightMap(entries, _UNUSED, buffers | _fixed_positions(config.vision))


def wrong_activation(config: CLIPConfig, names: Collection[str], file: str) -> str | None:
    """Return why weights have QuickGELU where the model has another activation, else None.

    OpenCLIP's names of files, folders and repositories say "openai" or "quickgelu".
    """
    towers = [tower for tower in (config.vision, config.text) if not isinstance(tower, ResNetConfig | BertConfig)]
    if all((tower.activation or config.activation) == "quick_gelu" for tower in towers):
        return None
    if all(name in names for name in _OPENAI):
        return f"it has the tensors {', '.join(_OPENAI)} of OpenAI"
    return "its name says so" if re.search(r"openai|quick_?gelu", file.lower()) else None


def is_timm(vision: Any) -> bool:
    """Return whether OpenCLIP builds an image tower with timm: one without class token."""
    return isinstance(vision, VisionConfig) and not vision.class_token


def needs_custom_text(config: CLIPConfig) -> bool:
    """Return whether OpenCLIP's `CustomTextCLIP` holds the model, with the prefix "text."; else `CLIP` does."""
    text = config.text
    if is_timm(config.vision) or isinstance(text, BertConfig):
        return True
    return not text.causal or text.pool != "end" or text.projection != "linear" or text.projection_bias


def is_counter(path: str) -> bool:
    """Return whether a variable is a count of batches, see `read_counters`."""
    return path.startswith(f"{COUNTERS}/")


def read_counters(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return PyTorch's counts of the batches of each BatchNorm by path, which the model does not read."""
    return {
        f"{COUNTERS}/{name}": array
        for name, array in tensors.items()
        if name.endswith(".num_batches_tracked") and array.shape == () and np.issubdtype(array.dtype, np.integer)
    }


def _fixed_positions(vision: Any) -> dict[str, np.ndarray]:
    """Return the table of fixed position embeddings, which OpenCLIP stores."""
    if not isinstance(vision, VisionConfig) or vision.pos_embed != "sin_cos_2d":
        return {}
    table = sin_cos_positions(vision.width, vision.image_size // vision.patch_size)
    return {"visual.positional_embedding": np.pad(table, ((1, 0), (0, 0)))}


def _timm_rules(own_head: bool) -> tuple[Rule, ...]:
    """Return the rules of a SigLIP image tower of timm."""
    trunk, pool = "visual.trunk", "visual.trunk.attn_pool"
    block, target = r"visual/transformer/block_0*(\d+)", f"{trunk}.blocks.{{0}}"
    query_and_rest = (1, 2)  # channels of the query and of key and value
    return (
        Rule(r"params/visual/positional_embedding", (f"{trunk}.pos_embed",), "unit_axis"),
        *module_rules("visual/conv1", f"{trunk}.patch_embed.proj"),
        Rule(rf"params/{block}/ls_(\d)", (f"{target}.ls{{1}}.gamma",)),
        *module_rules(f"{block}/ln_1", f"{target}.norm1"),
        *module_rules(f"{block}/attn/in_proj", f"{target}.attn.qkv"),
        *module_rules(f"{block}/attn/out_proj", f"{target}.attn.proj"),
        *module_rules(f"{block}/ln_2", f"{target}.norm2"),
        *module_rules(f"{block}/mlp/c_fc", f"{target}.mlp.fc1"),
        *module_rules(f"{block}/mlp/c_proj", f"{target}.mlp.fc2"),
        *module_rules("visual/ln_post", f"{trunk}.norm"),
        Rule(r"params/visual/attn_pool/probe", (f"{pool}.latent",), "unit_axes"),
        *module_rules("visual/attn_pool/attn/in_proj", f"{pool}.q", f"{pool}.kv", shares=query_and_rest),
        *module_rules("visual/attn_pool/attn/out_proj", f"{pool}.proj"),
        *module_rules("visual/attn_pool/ln", f"{pool}.norm"),
        *module_rules("visual/attn_pool/mlp/c_fc", f"{pool}.mlp.fc1"),
        *module_rules("visual/attn_pool/mlp/c_proj", f"{pool}.mlp.fc2"),
        *module_rules("visual/proj", f"{trunk}.head" if own_head else "visual.head.proj"),
    )


def _tower_rules(path: str, prefix: str) -> tuple[Rule, ...]:
    """Return the rules of a transformer tower."""
    block, target = rf"{path}/transformer/block_0*(\d+)", f"{prefix}transformer.resblocks.{{0}}"
    return (
        Rule(rf"params/{block}/attn/in_proj/kernel", (f"{target}.attn.in_proj_weight",)),
        Rule(rf"params/{block}/attn/in_proj/bias", (f"{target}.attn.in_proj_bias",)),
        Rule(rf"params/{block}/(ls_\d)", (f"{target}.{{1}}.gamma",)),
        *module_rules(rf"{block}/(\w+)", f"{target}.{{1}}"),
        *module_rules(rf"{block}/(\w+)/(\w+)", f"{target}.{{1}}.{{2}}"),
        *module_rules(rf"{path}/(\w+)", f"{prefix}{{0}}"),
        Rule(rf"params/{path}/(\w+)", (f"{prefix}{{0}}",)),
    )


def _resnet_rules() -> tuple[Rule, ...]:
    """Return the rules of the ResNet, with its running statistics."""
    rules: list[Rule] = []
    for collection, ours, theirs in (
        ("params", "(?:kernel|scale)", "weight"),
        ("params", "bias", "bias"),
        ("batch_stats", "mean", "running_mean"),
        ("batch_stats", "var", "running_var"),
    ):
        stage = rf"{collection}/visual/layer(\d)_(\d+)"
        rules += [
            Rule(rf"{stage}/downsample_conv/{ours}", (f"visual.layer{{0}}.{{1}}.downsample.0.{theirs}",)),
            Rule(rf"{stage}/downsample_bn/{ours}", (f"visual.layer{{0}}.{{1}}.downsample.1.{theirs}",)),
            Rule(rf"{stage}/(\w+)/{ours}", (f"visual.layer{{0}}.{{1}}.{{2}}.{theirs}",)),
            Rule(rf"{collection}/visual/attnpool/(\w+)/{ours}", (f"visual.attnpool.{{0}}.{theirs}",)),
            Rule(rf"{collection}/visual/(bn\d)/{ours}", (f"visual.{{0}}.{theirs}",)),
        ]
    return (*rules, Rule(r"params/visual/attnpool/positional_embedding", ("visual.attnpool.positional_embedding",)))
