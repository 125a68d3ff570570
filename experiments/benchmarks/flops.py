"""The operations of a dual encoder's matrix products, counted from its configuration."""

from infcl_jax.models import CLIPConfig
from infcl_jax.models.registry import TowerConfig, VisionConfig


def forward_flops(config: CLIPConfig) -> int:
    """Operations of encoding one image and one text in training; a multiplication and an addition are two.

    A layer over t tokens of width w with h hidden units has `t (8 w^2 + 4 t w + 4 w h)`: `6 t w^2` for queries, keys
    and values, `2 t w^2` for the output projection, `4 t^2 w` for all scores and all weighted values (causal or not),
    `4 t w h` for the MLP. To the layers of a tower come `2 w D` for the projection to D features, and for the images
    `6 n p^2 w` for embedding n patches of p^2 pixels; t is 1 + n for images, without the patches that patch dropout
    leaves out, and the context length for texts. Where one token of a sequence is asked for, the last layer with n
    heads has `8 w^2 + 4 n t w + 4 w h`, see `infcl_jax.ops.attention.api.attend_from`.

    Raises:
      ValueError: the image tower is no Vision Transformer.
    """
    vision, text = config.vision, config.text
    if not isinstance(vision, VisionConfig):
        raise ValueError(f"expected a Vision Transformer to count operations of, got {type(vision).__name__}")
    patches = (vision.image_size // vision.patch_size) ** 2
    kept = max(1, int(patches * (1 - vision.patch_dropout)))
    embedding = 6 * patches * vision.patch_size**2 * vision.width
    towers = _layers(vision, 1 + kept, vision.pool == "tok") + _layers(text, text.context_length, True)
    return embedding + towers + 2 * (vision.width + text.width) * config.embed_dim


def step_flops(config: CLIPConfig) -> int:
    """Operations of training on one pair: forward, and twice as many backward. What is computed again does not count.

    Neither do the loss, whose share depends on the batch, and the optimizer.
    """
    return 3 * forward_flops(config)


def _layers(tower: TowerConfig, tokens: int, one_asked: bool) -> int:
    width, hidden = tower.width, int(tower.width * tower.mlp_ratio)
    of_token = 8 * width**2 + 4 * width * hidden
    whole = tokens * (of_token + 4 * tokens * width)
    last = of_token + 4 * tower.heads * tokens * width if one_asked else whole
    return (tower.layers - 1) * whole + last
