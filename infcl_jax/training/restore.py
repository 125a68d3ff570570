"""Restoration of variables from a checkpoint, comparison of array types, and workarounds for orbax."""

import contextlib
import copy
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.runtime.console import say
from infcl_jax.training.checkpoint_folder import CHECKPOINTS, CheckpointFolder
from infcl_jax.training.state import evaluated_variables


def replicated_shapes(shapes: Any, mesh: Mesh) -> Any:
    """Return a template of `restore_variables` for copies on every device of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


def restore_variables(workdir: str | os.PathLike[str], template: Any, step: int | None = None) -> tuple[int, Any]:
    """Restore the variables of a checkpoint to evaluate.

    Moving averages replace the parameters if the checkpoint has them.

    Examples:
      >>> step, restored = restore_variables("runs/digits", variable_shapes(model))
      >>> step, sorted(restored["params"])
      (1, ['logit_scale', 'text', 'visual'])

    Args:
      workdir: directory of the run.
      template: variables with the structure, shapes, dtypes and shardings to restore, as `jax.ShapeDtypeStruct`.
      step: step of the checkpoint; None: the newest intact one.

    Returns:
      (step of the checkpoint, variables).

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      ValueError: an array of the checkpoint differs from `template` in shape or dtype, or all checkpoints are damaged.
        Also if orbax cannot read the checkpoint.
    """
    folder = CheckpointFolder(epath.Path(workdir) / CHECKPOINTS, say)
    steps = folder.steps()
    if not steps or step not in (None, *steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{missing} in {workdir}; its steps are {', '.join(map(str, steps)) or 'none yet'}")
    step = folder.intact_step(step)
    if step is None:
        raise FileNotFoundError(f"expected a complete checkpoint in {workdir}, got only one whose save was interrupted")
    path = folder.path / str(step)
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        with readable(path):
            saved = checkpointer.metadata(path).item_metadata["state"].tree
        check_array_types(step, {name: saved[name] for name in template if name in saved}, template)
        items = template | ({"ema": _ema_template(template, saved["ema"])} if "ema" in saved else {})
        args = ocp.checkpoint_utils.construct_restore_args(items)
        restore = ocp.args.PyTreeRestore(items, restore_args=args, partial_restore=True)
        with readable(path):
            restored = checkpointer.restore(path, ocp.args.Composite(state=restore))["state"]
        return step, evaluated_variables({name: restored[name] for name in template}, restored.get("ema"))


@contextlib.contextmanager
def readable(path: epath.Path) -> Iterator[None]:
    """Raise `ValueError` in one line if orbax cannot read a checkpoint without a manifest."""
    try:
        yield
    except (OSError, jax.errors.JaxRuntimeError):  # have their own messages
        raise
    except Exception as error:  # orbax and TensorStore raise any exception
        raise ValueError(
            f"expected a checkpoint in {path}, got one that orbax cannot read: {failure_reason(error)}"
        ) from error


def _ema_template(template: Any, saved: Any) -> Any:
    """Select the variables that have moving averages, in fp32."""
    if isinstance(template, Mapping):
        return {name: _ema_template(template[name], saved[name]) for name in saved}
    return jax.ShapeDtypeStruct(template.shape, np.float32, sharding=template.sharding)


def check_array_types(step: int, saved: Any, template: Any) -> None:
    """Raise `ValueError` at the first shape or dtype mismatch."""
    saved_types, expected_types = _array_types(saved), _array_types(template)
    # Parameters first: a mismatch of the model also changes the optimizer state, whose array names say less.
    for name in sorted(saved_types | expected_types, key=lambda name: (not name.startswith("params/"), name)):
        if saved_types.get(name) != expected_types.get(name):
            raise ValueError(
                f"the checkpoint of step {step} is of another run: {name} is "
                f"{saved_types.get(name, 'absent')} there and {expected_types.get(name, 'absent')} here; keep the "
                "run's settings or choose another --workdir"
            )


def _array_types(tree: Any) -> dict[str, str]:
    """Map array paths to types such as "float32[3, 4]"."""
    # Simple key strings, because orbax saves named tuples as dicts, whose keys `keystr` would quote.
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def array_fields(state: Any) -> dict[str, Any]:
    """Collect the fields of a train state to save: those with arrays, without None."""
    fields = {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats", "samples", "ema")}
    samples = fields["samples"]
    fields["samples"] = None if samples is None else {k: v for k, v in samples._asdict().items() if v is not None}
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def orbax_fixes() -> Iterator[None]:
    """Save without leaking memory, and without tracebacks in the log.

    TensorStore 0.1.86 leaks every string and list that it converts from JSON. Orbax converts one specification for each
    array and all metrics of TensorStore, twice. Inside the context, equal specifications are converted once and no
    metrics are read; orbax only logs them. The log records of orbax are dropped, since its errors are raised too.
    """
    specification = tensorstore.KvStore.Spec
    to_json = specification.to_json
    descriptor = vars(specification)["to_json"]  # binds `self`, unlike the function it wraps
    metrics = tensorstore.experimental_collect_matching_metrics
    converted: dict[str, Any] = {}

    @functools.wraps(to_json)
    def to_json_once(self: tensorstore.KvStore.Spec, *arguments: Any, **options: Any) -> Any:
        key = f"{self!r} {arguments} {options}"
        if key not in converted:
            converted[key] = to_json(self, *arguments, **options)
        return copy.deepcopy(converted[key])

    logger = logging.getLogger("absl")  # of orbax
    specification.to_json = to_json_once  # type: ignore[method-assign]
    tensorstore.experimental_collect_matching_metrics = lambda *arguments, **options: []
    logger.addFilter(_is_not_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_orbax)
        tensorstore.experimental_collect_matching_metrics = metrics
        specification.to_json = descriptor  # type: ignore[method-assign]


def failure_reason(error: Exception) -> str:
    """Describe the reason of a failed save, such as "No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = " ".join(str(error).split())
    # TensorStore's errors are long and end with the system's: [OS error 28: ENOSPC No space left on device].
    match = re.search(r"\[OS error \d+: (?:E[A-Z]+ )?([^\]]+)\]", text)
    return match[1] if match else f"{type(error).__name__}: {text[:200]}"


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname
