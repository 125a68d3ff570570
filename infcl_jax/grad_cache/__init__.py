"""Gradient caching (GradCache): exact full-batch gradients with chunk-sized activations."""

from infcl_jax.grad_cache.api import OFFLOADS as OFFLOADS
from infcl_jax.grad_cache.api import cached_value_and_grad as cached_value_and_grad
from infcl_jax.grad_cache.chunks import chunk_rows as chunk_rows
from infcl_jax.grad_cache.host import Replay as Replay
from infcl_jax.grad_cache.pairs import PairScores as PairScores
from infcl_jax.grad_cache.pairs import pairwise_scores_lse as pairwise_scores_lse
from infcl_jax.ops.linear import DERIVED as DERIVED
