"""FLOPs of a dual encoder's matrix products, from its configuration."""

from infcl_jax.models import CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.config import TowerConfig


def forward_flops(config: CLIPConfig) -> int:
    """Count the forward FLOPs of one image and one text in training.

    A multiplication and an addition are two FLOPs. A layer over t tokens of width w with h hidden units has
    `t (8 w^2 + 4 t w + 4 w h)`:

    | matrix product | FLOPs |
    | --- | --- |
    | projections to queries, keys and values | `6 t w^2` |
    | output projection | `2 t w^2` |
    | QK and PV, causal or not | `4 t^2 w` |
    | MLP | `4 t w h` |
    | projection to D features, once per sample | `2 w D` |
    | embedding of n patches of p^2 pixels, once per image | `6 n p^2 w` |

    For images t is n, without the patches that patch dropout removes, and 1 more for a class token. For texts t is the
    context length. If a tower pools one token, its last layer computes attention for that token only:
    `8 w^2 + 4 a t w + 4 w h` with a heads, see `infcl_jax.ops.attention.api.attend_from`. MAP pooling has
    `2 w^2` less, since its query is the same for all images.

    Raises:
      ValueError: the image tower is not a Vision Transformer, or the text tower is a BERT.
    """
    vision, text = config.vision, config.text
    if not isinstance(vision, VisionConfig):
        raise ValueError(f"expected a Vision Transformer, whose FLOPs can be counted, got {type(vision).__name__}")
    patches = (vision.image_size // vision.patch_size) ** 2
    if not isinstance(text, TextConfig):
        raise ValueError(f"expected a text tower of CLIP, whose FLOPs can be counted, got {type(text).__name__}")
    visible = int(vision.class_token) + max(1, int(patches * (1 - vision.patch_dropout)))
    embedding = 6 * patches * vision.patch_size**2 * vision.width
    towers = _layers(vision, visible, vision.pool == "tok") + _layers(text, text.context_length, True)
    if vision.pool == "map":
        towers += _one_token_layer(vision, visible) - 2 * vision.width**2
    return embedding + towers + 2 * (vision.width + text.width) * config.embed_dim


def step_flops(config: CLIPConfig) -> int:
    """Count the training FLOPs of one pair.

    The backward pass has twice the FLOPs of the forward pass. Recomputation and the optimizer are excluded, as is the
    loss, whose FLOPs depend on the batch size.
    """
    return 3 * forward_flops(config)


def _layers(tower: TowerConfig, tokens: int, pools_token: bool) -> int:
    width, hidden = tower.width, int(tower.width * tower.mlp_ratio)
    layer = tokens * (8 * width**2 + 4 * width * hidden + 4 * tokens * width)
    last_layer = _one_token_layer(tower, tokens) if pools_token else layer
    return (tower.layers - 1) * layer + last_layer


def _one_token_layer(tower: TowerConfig, tokens: int) -> int:
    width, hidden = tower.width, int(tower.width * tower.mlp_ratio)
    return 8 * width**2 + 4 * width * hidden + 4 * tower.heads * tokens * width
