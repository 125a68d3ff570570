"""Start of a run: its devices, its settings resolved, its parts built."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from infcl_jax.data.decode import gpu_decoder_installed
from infcl_jax.inference.text_encoder import TextEncoder
from infcl_jax.run.base import Run, make_run
from infcl_jax.run.frozen_towers import Teacher, on_host
from infcl_jax.run.load import load
from infcl_jax.run.model import DEFAULT_MODEL
from infcl_jax.runtime import compilation_cache, distributed
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import flat_mesh, training_mesh
from infcl_jax.runtime.process_watch import LOGS
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
    check: Callable[[], None] = lambda: None,
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
    run = make_run(
        config,
        mesh,
        source,
        origin=origin,
        recorded=recorded,
        changed=changed,
        teacher=load_teacher(config, mesh),
        check=check,
    )
    if recorded is None and config.text_packing == "auto":
        doing("reading the lengths of texts")
        run = _with_chosen_packing(run)
    if config.keep_best is not None and (names := run.suite.metric_names) and config.keep_best not in names:
        raise ValueError(f"expected keep_best to be one of {', '.join(names)}, got {config.keep_best!r}")
    _ = run.step, run.suite, run.init  # wrong settings end the run before its state is created
    return run


def _with_chosen_packing(run: Run) -> Run:
    """Return the run with padded texts, and say why, if none are packed."""
    if run.text_packing.packed:
        return run
    if str(run.text_packing):
        say(f"texts: {run.text_packing}")
    return run.with_padded_texts()


def load_teacher(config: RunConfig, mesh: Mesh) -> Teacher | None:
    """Load the teacher of a run; None without one."""
    if config.teacher is None:
        return None
    encoder = load(config.teacher.path, mesh=flat_mesh(mesh))
    if isinstance(encoder, TextEncoder) != (config.loss == "retrieval"):
        inputs = "queries and passages" if config.loss == "retrieval" else "images and texts"
        raise ValueError(f"expected {config.teacher.path_setting} to be a model of {inputs}, got {encoder!r}")
    model, variables, cache = encoder.model, on_host(encoder.variables), config.teacher.cache
    if isinstance(encoder, TextEncoder):  # a guide, whose scale is not used
        return Teacher(model, variables, encoder.texts, 1.0, cache)
    limit = math.inf if config.max_logit_scale is None else config.max_logit_scale
    return Teacher(model, variables, encoder.tokenizer, min(encoder.logit_scale, limit), cache)


def start_devices(config: RunConfig, workdir: str | Path | None = None) -> Mesh:
    """Initialize JAX over all processes, enable the compilation cache, and return the mesh of all devices.

    With a work directory, the native logs of several processes go there, otherwise to the terminal.
    """
    if config.cpu_devices > 1:
        _simulate_devices(config.cpu_devices)
    distributed.initialize(
        gpu_decode=config.decode != "pillow" and gpu_decoder_installed(),
        start_timeout=config.start_timeout,
        lost_process_timeout=config.lost_process_timeout,
        log_dir=None if workdir is None else Path(workdir, LOGS),
    )
    distributed.start_platforms()
    mesh = training_mesh(config.mesh)
    for name, size in (("batch_size", config.batch_size), ("evaluation.batch_size", config.evaluation.batch_size)):
        if size < 1 or size % mesh.size:
            raise ValueError(f"expected {name} to be a multiple of the {mesh.size} devices, got {size}")
    compilation_cache.enable(config.compilation_cache, say)
    return mesh


def start_processes() -> None:
    """Initialize JAX over all processes and enable the compilation cache, without the settings of a run."""
    distributed.initialize()
    compilation_cache.enable(None, say)


def _simulate_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.default_backend() == "cpu":
            raise ValueError(
                f"expected to set cpu_devices={count} before JAX is first used; restart this Python process (or "
                "notebook)"
            ) from error
