"""Dual encoder of queries and passages for dense text retrieval."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer

from infcl_jax.models.clip import TOWERS, l2_normalize
from infcl_jax.models.config import BertConfig
from infcl_jax.models.names import BERT_CONFIGS, bert_config
from infcl_jax.models.transformer_config import canonicalize_dtypes
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.common.checks import check_positive_int
from infcl_jax.ops.packing import PackedTokens

# Parameter subtree of each encoder; tied encoders have the one subtree "text".
TEXT_TOWERS = {"query": "query", "passage": "passage"}
TIED_TOWERS = {"query": "text", "passage": "text"}


def towers_of(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter subtree of each encoder, by its batch entry.

    Examples:
      >>> shapes = variable_shapes(build_model(text_pair_config("bert-tiny")))
      >>> towers_of(shapes["params"])
      {'query': 'query', 'passage': 'passage'}

    Args:
      params: all parameters of a `CLIP` or `TextPair`, arrays or shapes.
    """
    if "visual" in params:
        return TOWERS
    return TEXT_TOWERS if "query" in params else TIED_TOWERS


class TextPairOutput(NamedTuple):
    """Features of queries and passages.

    Examples:
      >>> output = TextPairOutput(image, text, jnp.float32(1))  # any features
      >>> loss = make_loss("retrieval", mesh)(output, passage_mask=jnp.ones(8, bool))
      >>> loss.value.shape
      ()

    Attributes:
      query: [b, embed_dim] in the model's feature dtype.
      passage: [b * p, embed_dim] for p passages per query, the positive first.
      logit_scale: float32 scalar that multiplies the similarities.
      logit_bias: None.
    """

    query: Float[Array, "b embed_dim"]
    passage: Float[Array, "bp embed_dim"]
    logit_scale: Float32[Array, ""]
    logit_bias: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPairConfig:
    """Configuration of a dual encoder of queries and passages.

    Examples:
      >>> bert = BertConfig(width=32, layers=2, heads=2, pool="cls", projection="none")
      >>> build_model(TextPairConfig(text=bert, embed_dim=32, tied=True)).embed_dim
      32

    Attributes:
      text: BERT of both encoders.
      embed_dim: size of the features, the width of `text` unless it has a projection.
      tied: whether queries and passages share one encoder.
      normalize: whether features have unit length (cosine similarity); DPR compares by dot product.
      logit_scale: constant that multiplies the similarities, the inverse temperature (1 in DPR).
      activation: activation of the MLPs, if `text` has none of its own.
      dtype: dtype of activations and GEMMs.
      param_dtype: dtype of the parameters.
      feature_dtype: dtype of the features; None for `dtype`.

    Raises:
      ValueError: a field has an invalid value.
    """

    text: BertConfig
    embed_dim: int
    tied: bool = False
    normalize: bool = False
    logit_scale: float = 1.0
    activation: Activation = "gelu"
    dtype: str = "float32"
    param_dtype: str = "float32"
    feature_dtype: str | None = None

    def __post_init__(self) -> None:
        check_positive_int("embed_dim", self.embed_dim)
        if self.text.projection == "none" and self.embed_dim != self.text.width:
            raise ValueError(
                f"expected embed_dim={self.text.width}, text.width, with text.projection 'none', got {self.embed_dim}"
            )
        if self.logit_scale <= 0:
            raise ValueError(f"expected logit_scale > 0, got {self.logit_scale}")
        canonicalize_dtypes(self, "dtype", "param_dtype", "feature_dtype")


class TextPair(nn.Module):
    """Dual encoder of queries and passages (Karpukhin et al. 2020, "Dense Passage Retrieval").

    Parameters: `query` and `passage`, one subtree per encoder, or `text` for tied encoders.

    Examples:
      >>> pair, ids = build_model(text_pair_config("bert-tiny")), np.zeros((2, 8), np.int32)
      >>> parameters = jax.jit(pair.init)(jax.random.key(0), ids, ids)
      >>> pair.apply(parameters, ids, method="encode_query").shape
      (2, 32)

    Attributes:
      text: encoder of both with tied encoders, integer [b, t] to [b, d]; None for separate ones.
      query: encoder of the queries; None for tied encoders.
      passage: encoder of the passages; None for tied encoders.
      feature_dtype: dtype of the features.
      normalize: whether features have unit length.
      scale: constant that multiplies the similarities.
    """

    text: nn.Module | None
    query: nn.Module | None
    passage: nn.Module | None
    feature_dtype: str = "float32"
    normalize: bool = False
    scale: float = 1.0

    def __call__(
        self,
        query: Integer[Array, "b t"] | PackedTokens,
        passage: Integer[Array, "bp u"] | PackedTokens,
        *,
        train: bool = False,
    ) -> TextPairOutput:
        """Encode queries and passages, see `encode_query`."""
        features = self.encode_query(query, train=train), self.encode_passage(passage, train=train)
        return TextPairOutput(*features, *self.logit_scale_and_bias())

    def encode_query(
        self, ids: Integer[Array, "b t"] | PackedTokens, *, train: bool = False
    ) -> Float[Array, "b embed_dim"]:
        """Encode queries to [b, embed_dim] in `feature_dtype`.

        `ids` are token ids [b, t] with t at most the context length, or the same packed. `train` turns dropout on,
        which needs the "dropout" rng unless the rate is 0.
        """
        return self._features(self.text or self.query, ids, train)

    def encode_passage(
        self, ids: Integer[Array, "b t"] | PackedTokens, *, train: bool = False
    ) -> Float[Array, "b embed_dim"]:
        """Encode a batch of passages, see `encode_query`."""
        return self._features(self.text or self.passage, ids, train)

    def logit_scale_and_bias(self) -> tuple[Float32[Array, ""], None]:
        """Return the constant scale of the similarities, and None."""
        return jnp.float32(self.scale), None

    def _features(self, encoder: Any, ids: jax.Array | PackedTokens, train: bool) -> jax.Array:
        features = encoder(ids, train=train)
        if self.normalize:
            return l2_normalize(features, self.feature_dtype)
        return features.astype(self.feature_dtype)

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a query or passage."""
        return (self.text or self.query).context_length  # type: ignore[union-attr, return-value]

    @property
    def embed_dim(self) -> int:
        """Size of the features."""
        return (self.text or self.query).embed_dim  # type: ignore[union-attr, return-value]


def text_tower(model: nn.Module, name: str) -> Any:
    """Return the text encoder "text", "query" or "passage" of a model; None if it has none."""
    return getattr(model, "text", None) or getattr(model, name, None)


def text_pair_config(name: str | None) -> TextPairConfig | None:
    """Return the configuration of DPR's dual encoder with a BERT.

    The result is None if no BERT has the name. Both encoders pool the first token without projection, and have dropout
    0.1 and 256 tokens per text.

    Examples:
      >>> text_pair_config("bert-base-uncased").embed_dim
      768

    Args:
      name: name on the Hugging Face hub such as "bert-base-uncased", or "bert-tiny" for two layers over bytes; None:
        no BERT.
    """
    if name == "bert-tiny":
        tiny = BertConfig(width=32, layers=2, heads=2, vocab_size=259, activation="gelu", max_positions=256)
        text = dataclasses.replace(tiny, pool="cls", projection="none", context_length=64)
    elif name is not None and name.rpartition("/")[2] in BERT_CONFIGS:
        text = bert_config(name, pool="cls", projection="none", context_length=256, dropout=0.1)
    else:
        return None
    return TextPairConfig(text=text, embed_dim=text.width)
