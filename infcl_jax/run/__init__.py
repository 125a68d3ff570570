"""Parts of a run, built from its configuration (see `docs/settings.md`)."""

from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER as TOKENIZER_FOLDER
from infcl_jax.run.model import read_model_config as read_model_config
from infcl_jax.run.model import saved_config as saved_config
from infcl_jax.run.parts import evaluation_suite as evaluation_suite
from infcl_jax.run.parts import initial_state as initial_state
from infcl_jax.run.parts import loss as loss
from infcl_jax.run.parts import next_batch as next_batch
from infcl_jax.run.parts import sample_source as sample_source
from infcl_jax.run.parts import text_tokenizer as text_tokenizer
from infcl_jax.run.parts import training_data as training_data
from infcl_jax.run.parts import training_source as training_source
from infcl_jax.run.parts import workload as workload
from infcl_jax.run.verification import verify_run as verify_run
