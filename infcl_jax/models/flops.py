"""FLOPs of a dual encoder's GEMMs and convolutions, from its configuration."""

from collections.abc import Collection, Mapping

from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, TowerConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.models.transformer_config import TransformerConfig


def forward_flops(config: CLIPConfig) -> int:
    """Count the forward FLOPs of one image and one text in training, see `group_flops`."""
    return sum(sum(groups) for groups in group_flops(config).values())


def step_flops(
    config: CLIPConfig,
    unlocked: Mapping[str, int] | None = None,
    precomputed: Collection[str] = (),
    text_tokens: int | None = None,
) -> int:
    """Count the training FLOPs of one pair.

    The backward pass has twice the FLOPs of the forward pass. Recomputation and the optimizer are excluded, as is the
    loss, whose FLOPs depend on the batch size.

    Args:
      config: model.
      unlocked: number of trained groups at the end of each frozen tower, see `infcl_jax.training.UnlockedGroups`; other
        towers are trained whole.
      precomputed: frozen towers whose features are read instead of computed.
      text_tokens: tokens of a text that count, on average; None for the context length.

    Examples:
      >>> from infcl_jax.models.flops import step_flops
      >>> step_flops(model_config("ViT-B-16")) / 1e9
      113.1327744
    """
    flops = 0
    for tower, groups in group_flops(config, text_tokens).items():
        count = len(groups) if unlocked is None else unlocked.get(tower, len(groups))
        trained = groups[max(0, len(groups) - count) :]
        flops += 0 if tower in precomputed else sum(groups) + 2 * sum(trained)
    return flops


def group_flops(config: CLIPConfig, text_tokens: int | None = None) -> dict[str, list[int]]:
    """Count the forward FLOPs of one sample in training, by tower and group of parameters.

    A multiplication and an addition are two FLOPs. A layer over t tokens of width w with h hidden units has
    `t (8 w^2 + 4 t w + 4 w h)`:

    | GEMM | FLOPs |
    | --- | --- |
    | projections to queries, keys and values | `6 t w^2` |
    | output projection | `2 t w^2` |
    | QK and PV, causal or not | `4 t^2 w` |
    | MLP | `4 t w h` |
    | projection to D features, once per sample | `2 w D` |
    | embedding of n patches of p^2 pixels, once per image | `6 n p^2 w` |

    For images t is n, without the patches that patch dropout removes, and 1 more for a class token. For texts t is the
    context length. If a tower of CLIP or SigLIP pools one token, its last layer computes attention for that token only:
    `8 w^2 + 4 a t w + 4 w h` with a heads, see `infcl_jax.ops.attention.api.attend_from`. MAP pooling has
    `2 w^2` less, since its query is the same for all images. A convolution with k x k weights from c to d channels has
    `2 k^2 c d` at each output position.

    Args:
      config: model.
      text_tokens: see `step_flops`.

    Returns:
      FLOPs of the groups of "image" and "text" from input to output, see `infcl_jax.training.parameter_groups`.
    """
    vision, text = config.vision, config.text
    image = _resnet if isinstance(vision, ResNetConfig) else _vit
    words = _bert if isinstance(text, BertConfig) else _text
    tokens = text.context_length if text_tokens is None else text_tokens
    return {
        "image": image(vision, config.embed_dim),  # type: ignore[arg-type]
        "text": words(text, config.embed_dim, tokens),  # type: ignore[arg-type]
    }


def _vit(tower: VisionConfig, embed_dim: int) -> list[int]:
    patches = (tower.image_size // tower.patch_size) ** 2
    tokens = int(tower.class_token) + max(1, int(patches * (1 - tower.patch_dropout)))
    layers = [layer_flops(tower, tokens)] * tower.layers
    if tower.pool == "tok":
        layers[-1] = _one_token_layer(tower, tokens)
    pool = _one_token_layer(tower, tokens) - 2 * tower.width**2 if tower.pool == "map" else 0
    return [6 * patches * tower.patch_size**2 * tower.width, *layers, pool + _projection(tower, embed_dim)]


def _text(tower: TextConfig, embed_dim: int, tokens: int) -> list[int]:
    layers = [layer_flops(tower, tokens)] * (tower.layers - 1) + [_one_token_layer(tower, tokens)]
    return [0, *layers, _projection(tower, embed_dim)]  # looking up embeddings is no GEMM


def _bert(tower: BertConfig, embed_dim: int, tokens: int) -> list[int]:
    pooler = 2 * tower.width**2 if tower.pool == "pooler" else 0
    if tower.projection == "mlp":
        projection = 2 * (tower.width + embed_dim) * ((tower.width + embed_dim) // 2)
    else:
        projection = _projection(tower, embed_dim)
    return [0, *[layer_flops(tower, tokens)] * tower.layers, pooler + projection]


def _resnet(tower: ResNetConfig, embed_dim: int) -> list[int]:
    width, side = tower.width, tower.image_size // 2
    stem = 9 * side**2 * (3 * width // 2 + width**2 // 4 + width**2 // 2)
    side //= 2
    stages, channels = [], width
    for stage, blocks in enumerate(tower.layers):
        planes, flops = width << stage, 0
        for block in range(blocks):
            halved = stage > 0 and block == 0
            flops += side**2 * (channels * planes + 9 * planes**2)
            side = side // 2 if halved else side  # after the second convolution
            shortcut = channels if block == 0 else 0
            flops += side**2 * 4 * planes * (planes + shortcut)
            channels = 4 * planes
        stages.append(2 * flops)
    positions = side**2 + 1
    # Query and output of one position, keys and values of all, then QK and PV.
    pool = 2 * (channels**2 + channels * embed_dim) + positions * (4 * channels**2 + 4 * channels)
    return [2 * stem, *stages, pool]


def _projection(tower: VisionConfig | TextConfig | BertConfig, embed_dim: int) -> int:
    return 0 if tower.projection == "none" else 2 * tower.width * embed_dim


def layer_flops(tower: TowerConfig | TransformerConfig, tokens: int) -> int:
    """Count the forward FLOPs of a layer for a row of tokens, see `group_flops`."""
    width, hidden = tower.width, int(tower.width * tower.mlp_ratio)
    return tokens * (8 * width**2 + 4 * width * hidden + 4 * tokens * width)


def _one_token_layer(tower: TowerConfig, tokens: int) -> int:
    width, hidden = tower.width, int(tower.width * tower.mlp_ratio)
    return 8 * width**2 + 4 * width * hidden + 4 * tower.heads * tokens * width
