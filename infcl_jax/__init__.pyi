"""Public names of the package, from which `__init__.py` imports them on first use."""

from infcl_jax import data as data
from infcl_jax import distributed as distributed
from infcl_jax import evaluation as evaluation
from infcl_jax import models as models
from infcl_jax import planner as planner
from infcl_jax import report as report
from infcl_jax import run as run
from infcl_jax import settings as settings
from infcl_jax import training as training
from infcl_jax import verification as verification
from infcl_jax.grad_cache import Replay as Replay
from infcl_jax.grad_cache import cached_value_and_grad as cached_value_and_grad
from infcl_jax.grad_cache import chunk_rows as chunk_rows
from infcl_jax.grad_cache import pairwise_scores_lse as pairwise_scores_lse
from infcl_jax.inference.encoder import Encoder as Encoder
from infcl_jax.inference.text_encoder import TextEncoder as TextEncoder
from infcl_jax.losses import SampleState as SampleState
from infcl_jax.losses import clip_loss as clip_loss
from infcl_jax.losses import create_samples as create_samples
from infcl_jax.losses import distillation_loss as distillation_loss
from infcl_jax.losses import global_contrastive_loss as global_contrastive_loss
from infcl_jax.losses import matryoshka as matryoshka
from infcl_jax.losses import retrieval_loss as retrieval_loss
from infcl_jax.losses import siglip_loss as siglip_loss
from infcl_jax.ops.pairwise.lse import PairwiseLSE as PairwiseLSE
from infcl_jax.ops.pairwise.lse import pairwise_lse as pairwise_lse
from infcl_jax.run import notebook as notebook
from infcl_jax.run.callbacks import Callback as Callback
from infcl_jax.run.embed import embed as embed
from infcl_jax.run.evaluate import evaluate as evaluate
from infcl_jax.run.evaluate import evaluate_weights as evaluate_weights
from infcl_jax.run.export import export as export
from infcl_jax.run.load import load as load
from infcl_jax.run.plan import plan as plan
from infcl_jax.run.train import train as train
from infcl_jax.runtime import exit_codes as exit_codes
from infcl_jax.verification import verify as verify

__version__: str
