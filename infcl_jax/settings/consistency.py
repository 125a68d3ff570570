"""Length of a run, and checks of settings that belong together, before data is read or anything is compiled."""

import dataclasses
import itertools
from collections.abc import Iterator, Sized
from typing import Any

from infcl_jax.losses.matryoshka import checked_dims
from infcl_jax.models import TOWERS, text_pair_config
from infcl_jax.settings.model_overrides import parse_overrides
from infcl_jax.settings.run_config import MOST_STEPS, RunConfig
from infcl_jax.training import learning_rate_schedule
from infcl_jax.training.frozen import check_frozen
from infcl_jax.training.losses import loss_class

_LENGTHS = ("total_steps", "samples_seen", "epochs")
_DEFAULT_STEPS = 1000  # without any of them


def total_steps(config: RunConfig, source: Sized | None = None) -> int:
    """Count the training steps of a run.

    `samples_seen` gives `samples_seen // batch_size` steps. Each of the `epochs` has `samples // batch_size` steps, in
    which every sample is seen at most once.

    Examples:
      >>> config = make_config({"samples_seen": 1_000_000, "batch_size": 1000})
      >>> total_steps(config)
      1000

    Args:
      config: settings of the run.
      source: training data; None is enough without `epochs`.

    Raises:
      ValueError: more than one of `total_steps`, `samples_seen` and `epochs` is given, or they give no step.
    """
    given = {name: config[name] for name in _LENGTHS if config[name] is not None}
    values = " and ".join(f"{name}={value}" for name, value in given.items())
    if len(given) > 1:
        raise ValueError(f"expected one of {', '.join(_LENGTHS)}, got {values}; set all but one to None")
    if config.epochs is not None:
        if source is None:
            raise ValueError(f"expected a source with {values}, got None; pass training_source(config)")
        steps = config.epochs * (len(source) // config.batch_size)
    elif config.samples_seen is not None:
        steps = config.samples_seen // config.batch_size
    else:
        steps = config.total_steps or _DEFAULT_STEPS
    if not steps:
        raise ValueError(f"expected samples for a batch of {config.batch_size}, got {values}; use a smaller batch_size")
    if steps > MOST_STEPS:
        raise ValueError(f"expected at most {MOST_STEPS} steps, got {values} with a batch of {config.batch_size}")
    return steps


def with_total_steps(config: RunConfig, source: Sized | None = None) -> RunConfig:
    """Return a copy of the configuration whose only length is `total_steps`, see there."""
    lengths = dict.fromkeys(_LENGTHS) | {"total_steps": total_steps(config, source)}
    return dataclasses.replace(config, **lengths)


def check_consistency(config: RunConfig) -> None:
    """Check that settings do not contradict each other, and none lacks another one that gives it an effect."""
    if config.precision != "auto" and (dtype := parse_overrides(config.model_overrides).get("dtype")) is not None:
        precision = f"precision={config.precision!r}"
        raise ValueError(
            f"expected no dtype in model_overrides with {precision}, got dtype={dtype}; leave one of both out"
        )
    rules = _task_rules(config), _target_rules(config), _tower_rules(config), _other_rules(config)
    for broken, message in itertools.chain(*rules):
        if broken:
            raise ValueError(message)
    if [name for name in _LENGTHS if config[name] is not None] != ["epochs"]:  # whose steps depend on the data
        learning_rate_schedule(config.optimizer, total_steps(config))


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
    "guide.cache": None,
}
_PASSAGES_ONLY = ("text_retrieval.corpus", "grad_cache.passage_chunk_size")  # None without text retrieval


def _task_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Yield rules that are broken if their first entry is true: loss, model and the rest are of one kind of data."""
    loss, is_pair = config.loss, text_pair_config(config.model) is not None
    expected = "loss='retrieval'" if is_pair else "a BERT such as model='bert-base-uncased'"
    yield is_pair != (loss == "retrieval"), f"expected {expected}, got model={config.model!r} and loss={loss!r}"
    kind = "loss 'retrieval'" if is_pair else f"{loss=}"
    for name, default in _IMAGES_ONLY.items() if is_pair else dict.fromkeys(_PASSAGES_ONLY).items():
        yield config[name] != default, f"expected {name}={default!r} with {kind}, got {config[name]!r}"


def _target_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Yield rules on the positives, the teacher and the prefixes of the loss, and on what they need of a batch."""
    loss, positives = config.loss, config.positives
    by_id, plain = positives != "pair", loss != "retrieval" and not loss_class(loss).inputs
    got = f"got {positives!r}"
    yield by_id and loss not in ("clip", "siglip"), f"expected positives='pair' with loss={loss!r}, {got}"
    smoothing = config.label_smoothing
    yield smoothing != 0 and loss != "clip", f"expected label_smoothing=0.0 with loss={loss!r}, got {smoothing}"
    yield (
        config.multi_positive != "mean" and not (by_id and loss == "clip"),
        f"expected multi_positive='mean' with loss={loss!r} and {positives=}, got {config.multi_positive!r}",
    )
    cached = config.cache_frozen is not None
    images = "image" in config.frozen and cached
    yield positives == "label" and images, f"expected other positives than 'label' with cached image features, {got}"
    checked_dims("matryoshka", config.matryoshka)
    distilled, guided = config.distill.path is not None, config.guide.path is not None
    for name, given in (("matryoshka", bool(config.matryoshka)), ("distill.teacher", distilled)):
        yield given and not plain, f"expected loss clip or siglip with {name}, got {loss}"
    yield guided and loss not in ("clip", "retrieval"), f"expected loss clip or retrieval with guide.model, got {loss}"
    yield guided and smoothing != 0, f"expected label_smoothing=0.0 with guide.model, got {smoothing}"
    yield guided and distilled, "expected guide.model or distill.teacher, got both; leave one out"
    replays = config.grad_cache.offload == "replay"
    needs = {"loss 'retrieval'": loss == "retrieval", f"{positives=}": by_id}
    if (teacher := config.teacher) is not None:
        needs[teacher.path_setting] = True
        yield (
            cached and teacher.cache is None,
            f"expected {teacher.prefix}cache with {teacher.path_setting} and cache_frozen, got None; the teacher would "
            "need images and texts, which are not read",
        )
    for name, needed in needs.items():
        yield needed and replays, f"expected grad_cache.offload 'none' or 'host' with {name}, got 'replay'"


def _tower_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Yield rules on frozen towers, of which one at least is trained."""
    frozen = config.frozen
    check_frozen(frozen, config.unlocked_groups)
    locked = all(name in frozen and not config.unlocked_groups[name] for name in TOWERS)
    yield locked, f"expected a tower to train, got {frozen=}; leave one out, or set unlocked_groups"
    yield len(set(frozen)) < len(frozen), f"expected each tower once in frozen, got {frozen}; leave one out"


def _other_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Yield rules on bad records, gradient caching, outputs, learning rates and moving averages."""
    if (limit := config.max_bad_records) is not None:
        whole = limit < 1 or limit == int(limit)
        yield not whole, f"expected max_bad_records below 1, or a whole number, got {limit}"
    batch, cache = config.batch_size, config.grad_cache
    cache.check_batch(batch, 1)
    if cache.chunk_size is not None:
        chunks = -(-batch // cache.chunk_size)
        expected = f"grad_cache.keep <= {chunks}, the chunks of a batch of {batch}"
        yield cache.keep > chunks, f"expected {expected}, got {cache.keep}; lower it"
    writers, steps = config.writers, config.profile
    yield len(set(writers)) < len(writers), f"expected each writer once in writers, got {writers}; leave one out"
    yield (
        bool(steps) and (len(steps) != 2 or steps[0] > steps[1]),
        f"expected profile=(first step, last step), got {steps}; give two steps such as (100, 110)",
    )
    peak, final = config.optimizer.learning_rate, config.optimizer.final_learning_rate
    expected = f"optimizer.final_learning_rate <= optimizer.learning_rate={peak}"
    yield final > peak, f"expected {expected}, got {final}; lower it"
    averages = config.ema_decay is not None
    missing = "expected ema_decay with ema_warmup=True, got None; give a decay such as 0.9999"
    yield config.ema_warmup and not averages, missing
