"""Verification of the training step of a configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from infcl_jax.data.packing import PackedEntry, Packing, TextPacker
from infcl_jax.losses import Loss
from infcl_jax.losses.base import TEACHER_INPUTS
from infcl_jax.models import ResNetConfig, towers_of
from infcl_jax.models.clip import row_shapes
from infcl_jax.run.base import Run, make_run
from infcl_jax.run.text_packing import text_towers
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.settings import AnyConfig, RunConfig, make_config, parse_overrides, with_changes
from infcl_jax.training import TrainState, make_train_step
from infcl_jax.training.frozen import merge, module_modes, partition
from infcl_jax.training.step import encode_rows, evaluate_loss, loss_inputs, model_output
from infcl_jax.verification import Report, verify

_ROWS_PER_DEVICE = 4  # two chunks of two rows
_CHUNKS = 2
_PASSAGE_CHUNKS = 4  # with a size of their own, so that chunks of queries and of passages differ
_HEAD_DIM = 64  # every attention implementation supports it
_TOKENS = 12
_STEPS = 1000  # of the learning rate schedule
_TEACHER_WIDTH, _TEACHER_SCALE = 24, 20.0


def verify_run(config: AnyConfig, mesh: Mesh, rtol: float = 1e-3) -> Report:
    """Compare the training step of a configuration with the undivided loss, at small shapes.

    The step has the loss, the implementation, the devices, the gradient caching, the frozen towers and the parameter
    sharding of the configuration. Its model has towers of one small layer in fp32 without dropout, its batch four
    random pairs for each device, with random features of a teacher or guide. Queries have random passages, of which
    some are masked. Texts are packed unless `text_packing` is "off". Nothing is read from disk. Then one step of the
    optimizer must move all trained groups and no frozen one.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> report = infcl_jax.run.verify_run(config, mesh)
      >>> report.verdict
      'right: loss and gradients agree within 0.001'

    Args:
      config: settings of the run.
      mesh: devices over which the batch is sharded.
      rtol: largest accepted relative error.

    Raises:
      ValueError: a setting is wrong, or there is more than one process.
    """
    if jax.process_count() > 1:
        raise ValueError(f"expected one process, got {jax.process_count()}; simulate devices with cpu_devices")
    small = small_config(make_config(config), _ROWS_PER_DEVICE * mesh.size)
    source: Any = range(2 * small.batch_size)
    run = make_run(small, mesh, source)
    step = _Step(run, run.init.create(), run.make_loss(_TEACHER_SCALE))
    batch, names = _random_batch(run, step.loss), towers_of(step.state.params)
    dense = "dense" if "dense" in step.loss.implementations else None
    reference = dataclasses.replace(small, implementation=dense)
    undivided = make_run(reference, source=source).make_loss(_TEACHER_SCALE)
    with jax.default_matmul_precision("highest"):
        return verify(
            step.undivided(undivided),
            {name: step.encoder(name) for name in names},
            jax.device_get(step.state.params),
            {name: batch[name] for name in (*names, *step.loss.batch_inputs) if name in batch},
            mesh=mesh,
            chunk_size=small.grad_cache.chunk_size,
            value_and_grad=step.value_and_grad,
            update=step.update,
            frozen=[names[name] for name in step.state.frozen_towers],
            rtol=rtol,
        )


def small_config(config: RunConfig, rows: int) -> RunConfig:
    """Return the settings of a run at small shapes, with this batch size."""
    run = make_run(config)
    overrides = parse_overrides(config.model_overrides) | _small_model(run)
    changes = {
        "model_overrides": ",".join(f"{name}={value!r}" for name, value in overrides.items()),
        "precision": "auto",  # the overrides have a dtype
        "batch_size": rows,
        "total_steps": _STEPS,
        "samples_seen": None,
        "epochs": None,
        "optimizer.warmup_steps": 0,
    }
    if config.grad_cache.chunk_size is not None:
        # Replayed chunks differ from those in host memory by their source alone, which is random data here.
        offload = "none" if config.grad_cache.offload == "none" else "host"
        chunk = {"chunk_size": rows // _CHUNKS, "keep": min(abs(config.grad_cache.keep), 1), "offload": offload}
        if config.grad_cache.passage_chunk_size is not None:
            chunk["passage_chunk_size"] = rows * run.passages // _PASSAGE_CHUNKS
        changes["grad_cache"] = chunk
    return with_changes(config, changes)


def _small_model(run: Run) -> dict[str, Any]:
    """Return model overrides: small shapes, fp32 and no dropout."""
    model, size = run.model_config, _HEAD_DIM * -(-max(run.config.matryoshka, default=1) // _HEAD_DIM)
    tower = {"width": size, "layers": 1, "heads": size // _HEAD_DIM, "dropout": 0.0}
    towers: dict[str, Any] = {"text": tower | {"context_length": min(_TOKENS, model.text.context_length)}}
    vision = getattr(model, "vision", None)
    if isinstance(vision, ResNetConfig):
        towers["vision"] = {"width": 8, "layers": (1, 1, 1, 1), "heads": 4, "image_size": 64}
    elif vision is not None:
        towers["vision"] = tower | {"image_size": 2 * vision.patch_size, "patch_dropout": 0.0}
    values = {f"{name}.{key}": v for name, fields in towers.items() for key, v in fields.items()}
    dtypes = dict.fromkeys(("dtype", "param_dtype", "feature_dtype"), "float32")
    return values | dtypes | {"embed_dim": size}


def _random_batch(run: Run, loss: Loss) -> dict[str, np.ndarray]:
    """Draw the entries of a batch: encoders' inputs, sample indices, repeating ids and features of a teacher.

    The passages of a query are `[p, t]`, the positive first, which is never masked.
    """
    rng, rows, passages = np.random.default_rng(run.config.seed), run.config.batch_size, run.passages
    batch: dict[str, np.ndarray] = {}
    if "passage_mask" in loss.batch_inputs:
        batch["passage_mask"] = np.arange(passages) < rng.integers(1, passages, (rows, 1), endpoint=True)
    for name, row in row_shapes(run.model, rows).items():
        shape = (rows, passages, *row.shape[1:]) if name == "passage" else row.shape
        low, high = (0, 256) if row.dtype == np.uint8 else (1, run.model_config.text.vocab_size)
        batch[name] = rng.integers(low, high, shape, dtype=row.dtype)
    index, ids = rng.permutation(2 * rows)[:rows], rng.integers(0, [1, max(2, rows // 2)], (rows, 2), dtype=np.int32)
    for name in TEACHER_INPUTS:
        shape = (rows, passages) if name == "teacher_passage" else (rows,)
        features = rng.normal(size=(*shape, _TEACHER_WIDTH)).astype(np.float32)
        batch[name] = features / np.linalg.norm(features, axis=-1, keepdims=True)
    return batch | {"index": index.astype(np.int32), "ids": ids}


def _packer(run: Run) -> TextPacker:
    """Return the packing of the random texts, which always fit."""
    entries = {}
    for name, tower in text_towers(run.model).items() if run.config.text_packing == "auto" else ():
        rows = run.config.batch_size * (run.passages if name == "passage" else 1)
        shard = (run.grad_cache.chunk_of(name) or rows) // run.mesh.size
        if not tower.attends_to_padding:
            packing = Packing(2 * tower.context_length, rows=shard, shard=shard)
            entries[name] = PackedEntry(packing, tower.lengths, tower.context_length)
    return TextPacker(entries, run.mesh.size)


def _flat_passages(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the axes of queries and passages, as in the batches of the step and the loss."""
    return {name: a.reshape(-1, *a.shape[2:]) if "passage" in name else a for name, a in batch.items()}


@dataclasses.dataclass(frozen=True)
class _Step:
    """Training step of a run as a function of parameters and batch.

    Batch entries have one row for each pair or query: passages are `[b, p, ...]`.
    """

    run: Run
    state: TrainState
    loss: Loss

    def value_and_grad(self, params: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Any]:
        """Run the step with an optimizer that stores the gradients."""
        run, host = self.run, _flat_passages(jax.device_get(dict(batch)))
        step = make_train_step(self.loss, run.config.seed, run.grad_cache, run.mesh, run.config.parameter_sharding)
        state = self._with_params(params)
        state = state.replace(tx=_RECORDER, opt_state=_RECORDER.init(state.trained))
        host = _packer(run).plan(host)
        rows = jax.tree.map(lambda a: shard_batch(run.mesh, a), host) if run.grad_cache.offload == "none" else host
        state, metrics = step(state, rows)
        return metrics["loss"], merge(jax.tree.map(jnp.zeros_like, params), state.opt_state)

    def update(self, params: Any, grads: Any) -> Any:
        """Update the parameters with the optimizer of the run."""
        state = self._with_params(params)
        trained = partition(grads, state.frozen)[0]
        limit = self.loss.max_logit_scale
        return jax.jit(lambda state: state.apply_gradients(grads=trained, max_logit_scale=limit).params)(state)

    def encoder(self, name: str) -> Any:
        """Return the encoder of a tower in training mode."""

        def encode(params: Any, rows: Any, rng: jax.Array | None) -> jax.Array:
            trained, fixed = partition(params, self.state.frozen)
            variables = jax.device_get(self.state.variables) | {"params": merge(trained, jax.lax.stop_gradient(fixed))}
            options: dict[str, Any] = {"rngs": {"dropout": jax.random.key(0)}, "mutable": ["batch_stats"]}

            flat = _flat_passages({name: rows})[name]

            def method(model: Any) -> jax.Array:
                return encode_rows(model, name, flat, frozen=False)

            with module_modes(params, self.state.frozen):
                features = self.state.apply_fn(variables, method=method, **options)[0]
            return features.reshape(*rows.shape[:2], -1) if name == "passage" else features

        return encode

    def undivided(self, one_device: Loss) -> Any:
        """Return the loss on one device as a function of parameters and features."""
        samples = one_device.init_samples(2 * self.run.config.batch_size, self.run.init_logit_scale)

        def value(params: Any, features: Mapping[str, Any]) -> jax.Array:
            scalars = self.state.apply_fn({"params": params}, method="logit_scale_and_bias")
            flat, state = _flat_passages(features), self.state.replace(samples=samples, step=0)
            return evaluate_loss(one_device, model_output(flat, *scalars), loss_inputs(one_device, state, flat))[0]

        return value

    def _with_params(self, params: Any) -> TrainState:
        """Copy the state, which the step donates, with other parameters."""
        shardings = jax.tree.map(lambda a: a.sharding, self.state.params)
        return jax.tree.map(jnp.copy, self.state).replace(params=jax.device_put(params, shardings))


def _record(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del state, params
    return jax.tree.map(jnp.zeros_like, updates), updates


_RECORDER = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), _record)
