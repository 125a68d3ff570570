"""Checks of settings that belong together, before data is read or anything is compiled."""

from typing import Any

from infcl_jax.losses.matryoshka import checked_dims
from infcl_jax.models import TOWERS, text_pair_config
from infcl_jax.settings.length import total_steps
from infcl_jax.settings.precision import check_precision
from infcl_jax.settings.run_config import RunConfig
from infcl_jax.training import learning_rate_schedule
from infcl_jax.training.frozen import check_frozen
from infcl_jax.training.losses import loss_class


def check_consistency(config: RunConfig) -> None:
    """Check the settings that limit each other, across the groups.

    Raises:
      ValueError: settings contradict each other, or have no effect without another one.
    """
    if (limit := config.max_bad_records) is not None and limit >= 1 and limit != int(limit):
        raise ValueError(f"expected max_bad_records below 1, or a whole number, got {limit}")
    check_precision(config.precision, config.model_overrides)
    _check_text_retrieval(config)
    _check_targets(config)
    _check_frozen(config)
    _check_grad_cache(config)
    _check_outputs(config)
    _check_matryoshka(config)
    _check_distill(config)
    optimizer = config.optimizer
    if optimizer.final_learning_rate > optimizer.learning_rate:
        raise ValueError(
            f"expected optimizer.final_learning_rate <= optimizer.learning_rate={optimizer.learning_rate}, got "
            f"{optimizer.final_learning_rate}; lower it"
        )
    if config.ema_warmup and config.ema_decay is None:
        raise ValueError("expected ema_decay with ema_warmup=True, got None; give a decay such as 0.9999")
    lengths = [name for name in ("total_steps", "samples_seen", "epochs") if config[name] is not None]
    if lengths != ["epochs"]:  # whose steps depend on the data
        learning_rate_schedule(optimizer, total_steps(config))


# Settings that text retrieval does not support, with the values that leave them out.
_IMAGES_ONLY: dict[str, Any] = {
    "frozen": (),
    "cache_frozen": None,
    "export": False,
    "evaluations": (),
    "init.model": None,
    "init.image": None,
    "init.rules": (),
    "evaluation.retrieval_dataset": None,
    "evaluation.zero_shot_dataset": None,
    "optimizer.layer_decay": (1.0, 1.0),
}


def _check_text_retrieval(config: RunConfig) -> None:
    """Check that loss, model and the other settings are all of text retrieval, or none is."""
    is_pair = text_pair_config(config.model) is not None
    if is_pair != (config.loss == "retrieval"):
        expected = "loss='retrieval'" if is_pair else "a BERT such as model='bert-base-uncased'"
        raise ValueError(f"expected {expected}, got model={config.model!r} and loss={config.loss!r}")
    if not is_pair:
        passages = {
            "text_retrieval.corpus": config.text_retrieval.corpus,
            "grad_cache.passage_chunk_size": config.grad_cache.passage_chunk_size,
        }
        for name, value in passages.items():
            if value is not None:
                raise ValueError(f"expected {name}=None with loss={config.loss!r}, got {value!r}")
        return
    for name, default in _IMAGES_ONLY.items():
        if (value := config[name]) != default:
            raise ValueError(f"expected {name}={default!r} with loss 'retrieval', got {value!r}")
    if config.grad_cache.residency == "replay":
        raise ValueError("expected grad_cache.residency 'device' or 'host' with loss 'retrieval', got 'replay'")


def _check_targets(config: RunConfig) -> None:
    """Check that the loss has the targets that are set."""
    by_id = config.positives != "pair"
    if by_id and config.loss not in ("clip", "siglip"):
        raise ValueError(f"expected positives='pair' with loss={config.loss!r}, got {config.positives!r}")
    if by_id and config.grad_cache.residency == "replay":
        raise ValueError(
            f"expected grad_cache.residency 'device' or 'host' with positives={config.positives!r}, got 'replay'"
        )
    if config.label_smoothing and config.loss != "clip":
        raise ValueError(f"expected label_smoothing=0.0 with loss={config.loss!r}, got {config.label_smoothing}")
    if config.multi_positive != "mean" and not (by_id and config.loss == "clip"):
        raise ValueError(
            f"expected multi_positive='mean' with loss={config.loss!r} and positives={config.positives!r}, got "
            f"{config.multi_positive!r}"
        )
    if config.positives == "label" and "image" in config.frozen and config.cache_frozen is not None:
        raise ValueError("expected other positives than 'label' with cached image features, got 'label'")


def _check_frozen(config: RunConfig) -> None:
    """Check that at least one tower is trained."""
    check_frozen(config.frozen, config.unlocked_groups)
    locked = [name for name in TOWERS if name in config.frozen and not config.unlocked_groups[name]]
    if len(locked) == len(TOWERS):
        raise ValueError(
            f"expected a tower to train, got frozen={config.frozen}; leave one out, or set unlocked_groups"
        )
    if len(set(config.frozen)) < len(config.frozen):
        raise ValueError(f"expected each tower once in frozen, got {config.frozen}; leave one out")


def _check_outputs(config: RunConfig) -> None:
    """Check the writers of metrics and the steps of the profile."""
    writers, steps = config.writers, config.profile
    if len(set(writers)) < len(writers):
        raise ValueError(f"expected each writer once in writers, got {writers}; leave one out")
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise ValueError(f"expected profile=(first step, last step), got {steps}; give two steps such as (100, 110)")


def _check_matryoshka(config: RunConfig) -> None:
    """Check that the loss can be summed over increasing prefixes."""
    checked_dims("matryoshka", config.matryoshka)
    if config.matryoshka and (config.loss == "retrieval" or loss_class(config.loss).inputs):
        raise ValueError(f"expected loss clip or siglip with matryoshka, got {config.loss}")


def _check_distill(config: RunConfig) -> None:
    """Check that the loss and the batches allow a teacher."""
    distill = config.distill
    if distill.teacher is None:
        return
    if config.loss == "retrieval" or loss_class(config.loss).inputs:
        raise ValueError(f"expected loss clip or siglip with distill.teacher, got {config.loss}")
    if config.grad_cache.residency == "replay":
        raise ValueError("expected grad_cache.residency 'device' or 'host' with distill.teacher, got 'replay'")
    if config.cache_frozen is not None and distill.cache is None:
        raise ValueError(
            "expected distill.cache with distill.teacher and cache_frozen, got None; the teacher would need images and "
            "texts, which are not read"
        )


def _check_grad_cache(config: RunConfig) -> None:
    """Check the chunks of gradient caching against the batch."""
    config.grad_cache.check_batch(config.batch_size, 1)
    size, keep = config.grad_cache.chunk_size, config.grad_cache.keep
    if size is not None and keep > (chunks := -(-config.batch_size // size)):
        raise ValueError(
            f"expected grad_cache.keep <= {chunks}, the chunks of a batch of {config.batch_size}, got {keep}; lower it"
        )
