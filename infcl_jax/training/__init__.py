"""Training loop components: state, step, optimizer, checkpoints and metrics."""

from infcl_jax.runtime.data_wait import DataWait
from infcl_jax.runtime.garbage import rare_garbage_collection
from infcl_jax.runtime.outputs import Outputs
from infcl_jax.runtime.preemption import Preemption
from infcl_jax.runtime.profile import Profile
from infcl_jax.runtime.run_console import LOG_FILE, RunConsole
from infcl_jax.runtime.train_progress import Pauses, TrainProgress
from infcl_jax.runtime.workdir import load_config, prepare_workdir, save_config
from infcl_jax.runtime.workdir_lock import WorkdirLock
from infcl_jax.training.checkpoint import Checkpointer
from infcl_jax.training.checkpoint_folder import CHECKPOINTS
from infcl_jax.training.ema import EMAConfig, evaluated_variables
from infcl_jax.training.frozen import UnlockedGroups, frozen_parameters, parameter_groups
from infcl_jax.training.global_contrastive import GlobalContrastive, GlobalContrastiveConfig
from infcl_jax.training.grad_cache import BATCH_RESIDENCIES, NO_CACHE, GradCacheConfig
from infcl_jax.training.losses import LOSSES, DistillConfig, loss_class, make_loss
from infcl_jax.training.metrics import METRICS_FILE, MetricWriter, read_metrics
from infcl_jax.training.nonfinite import ON_NONFINITE, check_finite
from infcl_jax.training.optimizer_config import OptimizerConfig
from infcl_jax.training.optimizers import check_optimizer, learning_rate_schedule, make_optimizer
from infcl_jax.training.replay import replayed
from infcl_jax.training.restore import restore_variables
from infcl_jax.training.safeguards import Safeguards
from infcl_jax.training.state import TrainState, create_state, parameter_count
from infcl_jax.training.step import make_train_step
from infcl_jax.training.text_retrieval import TextRetrievalConfig
from infcl_jax.training.writers import WRITERS, Writer

__all__ = [
    "BATCH_RESIDENCIES",
    "CHECKPOINTS",
    "LOG_FILE",
    "LOSSES",
    "METRICS_FILE",
    "NO_CACHE",
    "ON_NONFINITE",
    "WRITERS",
    "Checkpointer",
    "DataWait",
    "DistillConfig",
    "EMAConfig",
    "GlobalContrastive",
    "GlobalContrastiveConfig",
    "GradCacheConfig",
    "MetricWriter",
    "OptimizerConfig",
    "Outputs",
    "Pauses",
    "Preemption",
    "Profile",
    "RunConsole",
    "Safeguards",
    "TextRetrievalConfig",
    "TrainProgress",
    "TrainState",
    "UnlockedGroups",
    "WorkdirLock",
    "Writer",
    "check_finite",
    "check_optimizer",
    "create_state",
    "evaluated_variables",
    "frozen_parameters",
    "learning_rate_schedule",
    "load_config",
    "loss_class",
    "make_loss",
    "make_optimizer",
    "make_train_step",
    "parameter_count",
    "parameter_groups",
    "prepare_workdir",
    "rare_garbage_collection",
    "read_metrics",
    "replayed",
    "restore_variables",
    "save_config",
]
