"""Start of a run: its settings resolved, its parts built."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from infcl_jax.run.base import Run
from infcl_jax.run.frozen_towers import Teacher, on_host
from infcl_jax.run.kinds import make_run
from infcl_jax.run.load import load_encoder
from infcl_jax.run.model import DEFAULT_MODEL
from infcl_jax.runtime.mesh import flat_mesh
from infcl_jax.settings import (
    SETTINGS,
    RunConfig,
    changed_settings,
    check_fixed,
    keep_recorded,
    resolved_precision,
    with_changes,
    with_total_steps,
)


def build_run(
    config: RunConfig,
    mesh: Mesh,
    *,
    origin: Path | None = None,
    recorded: RunConfig | None = None,
    check: Callable[[], None] | None = None,
    doing: Callable[[str], None] = lambda phase: None,
) -> Run:
    """Build a run to train; a resumed run keeps the settings that were chosen at its start.

    `doing` gets the name of each phase. For the other arguments see `Run`.
    """
    doing("reading the dataset")
    source = make_run(config).open_data()
    config = with_total_steps(config, source)
    if recorded is not None:
        config = keep_recorded(recorded, config)
    chosen = {"precision": resolved_precision(config.precision, config.model_overrides)}
    if config.model is None and config.init.model is None:
        chosen["model"] = DEFAULT_MODEL
    config = with_changes(config, chosen)
    changed = {} if recorded is None else changed_settings(recorded, config)
    fixed = [name for name, setting in SETTINGS.items() if setting.fixed]
    check_fixed(changed, fixed, origin or "", "keep it, or choose another --workdir")
    doing("preparing the model")
    teacher = None if config.distill.teacher is None else load_teacher(config, mesh)
    run = make_run(config, mesh, source, origin, recorded, changed, teacher, check)
    # Wrong settings end the run here, before its state is created.
    if config.keep_best is not None and (names := run.suite.metric_names) and config.keep_best not in names:
        raise ValueError(f"expected keep_best to be one of {', '.join(names)}, got {config.keep_best!r}")
    _ = run.step, run.suite, run.init
    return run


def load_teacher(config: RunConfig, mesh: Mesh) -> Teacher:
    """Load the teacher of a run."""
    encoder, limit = load_encoder(config.distill.teacher, mesh=flat_mesh(mesh)), config.max_logit_scale
    scale = encoder.logit_scale if limit is None else min(encoder.logit_scale, limit)
    return Teacher(encoder.model, on_host(encoder.variables), encoder.tokenizer, scale, config.distill.cache)
