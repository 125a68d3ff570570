"""Suggestions for unknown names of settings."""

import difflib

from infcl_jax.settings.run_config import SETTINGS

# Usual names of other libraries and of papers, by setting.
_OTHER_NAMES = {
    "batch_size": "bs batch train_batch_size global_batch_size per_device_train_batch_size",
    "cache_frozen": "cache_features",
    "checkpoint_every": "save_every save_steps save_frequency save_freq checkpoint_freq",
    "dataset": "data train_data train_dataset data_path dataset_path path",
    "ema_decay": "ema model_ema",
    "epochs": "epoch num_epochs max_epochs num_train_epochs",
    "eval_every": "eval_steps eval_freq eval_frequency val_every val_frequency",
    "frozen": "freeze lock lock_image lock_text",
    "grad_cache.chunk_size": "accum_freq accum_steps accumulation_steps grad_accum gradient_accumulation_steps "
    "micro_batch_size",
    "grad_cache.offload": "residency data_offload",
    "init.model": "pretrained init weights checkpoint ckpt",
    "log_every": "log_steps logging_steps log_freq log_every_n_steps",
    "loss": "loss_fn objective",
    "model": "arch architecture backbone model_name",
    "model_overrides": "image_size img_size context_length embed_dim remat grad_checkpointing gradient_checkpointing",
    "num_workers": "workers dataloader_num_workers",
    "optimizer.beta1": "b1 momentum adam_beta1",
    "optimizer.beta2": "b2 adam_beta2",
    "optimizer.clip_norm": "clip grad_clip clip_grad grad_clip_norm gradient_clip max_grad_norm gradient_clip_val",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.final_learning_rate": "min_lr lr_min end_lr final_lr",
    "optimizer.learning_rate": "lr base_lr peak_lr max_lr",
    "optimizer.name": "optimizer opt optim",
    "optimizer.schedule": "scheduler lr_scheduler lr_schedule",
    "optimizer.temperature_learning_rate": "temperature_lr logit_scale_lr",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup",
    "optimizer.weight_decay": "wd decay",
    "precision": "dtype amp bf16 fp16 mixed_precision",
    "resume": "resume_from resume_from_checkpoint",
    "samples_seen": "samples num_samples train_num_samples",
    "seed": "random_seed rng",
    "total_steps": "steps max_steps num_steps train_steps iterations num_iterations",
    "writers": "wandb tensorboard report_to logger loggers",
}
_MEANT = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}


def closest_setting(name: str) -> str | None:
    """Return the setting that an unknown name, dotted or of a field, probably means; None without one.

    Examples:
      >>> closest_setting("optimizer.lr"), closest_setting("warmup_step")
      ('optimizer.learning_rate', 'optimizer.warmup_steps')
    """
    field = name.rpartition(".")[2].lower().replace("-", "_")
    fields: dict[str, str] = {}
    for setting in SETTINGS:
        fields.setdefault(setting.rpartition(".")[2], setting)
    if close := difflib.get_close_matches(name, SETTINGS, 1, cutoff=0.85):
        return close[0]
    if field in _MEANT or field in fields:
        return _MEANT.get(field) or fields[field]
    if close := difflib.get_close_matches(field, [*fields, *_MEANT], 1, cutoff=0.75):
        return fields.get(close[0]) or _MEANT[close[0]]
    return next(iter(difflib.get_close_matches(name, SETTINGS, 1)), None)
