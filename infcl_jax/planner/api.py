"""Memory plan of one training step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, cast

import jax.numpy as jnp
import optax

from infcl_jax.data import Packing
from infcl_jax.models import CLIP, CLIPConfig, TextPair, TextPairConfig, build_model
from infcl_jax.models.clip import row_shapes
from infcl_jax.models.convert import config_of
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.implementations import IMPLEMENTATIONS
from infcl_jax.planner.activations import EncoderMemory, Linear, encoder_memory, feature_width, parameter_shapes
from infcl_jax.planner.devices import planned_device
from infcl_jax.planner.loss import loss_workspace
from infcl_jax.planner.state import TeacherMemory, state_bytes
from infcl_jax.training import NO_CACHE, GradCacheConfig, compiled_step, loss_class
from infcl_jax.training.frozen import ALL_LOCKED, UnlockedGroups, check_frozen, frozen_parameters, frozen_towers
from infcl_jax.training.sharding import PARAMETER_SHARDINGS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Settings of a training step that determine its memory.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64, devices=8)
      >>> run.block_rows
      8

    Attributes:
      model: `CLIP` or `TextPair` module, or its configuration.
      optimizer: optimizer, for the sizes of its state and updates.
      batch_size: global batch size b.
      devices: number of devices n over which the batch is sharded. The train state is replicated, except with "fsdp".
      cache: settings of gradient caching. With offload "none", device memory holds the current and the next batch.
        With "host" or "replay", it holds two chunks and the next one.
      implementation: implementation of the loss, one of `infcl_jax.ops.pairwise.lse.IMPLEMENTATIONS`.
      loss: training loss, one of `infcl_jax.training.LOSSES`.
      parameter_sharding: "replicated" or "fsdp", see `infcl_jax.training.create_state`.
      frozen: frozen towers, "image" or "text".
      unlocked_groups: trained groups of the frozen towers.
      precomputed: frozen towers whose features are read in place of their images or texts.
      ema: whether the state has moving averages of the parameters.
      sample_bytes: bytes of a global contrastive loss's sample state on each device.
      passages: passages of each query of a `TextPair`.
      teacher: teacher of a run with distillation or guided negatives; None: neither.
      by_id: whether positives are given by id, see `infcl_jax.clip_loss`.
      packings: packing of texts by encoder, which saves time; memory is planned for batches that do not fit, which are
        padded.

    Raises:
      ValueError: a name is unknown, a number is out of range, or the batch or chunk size does not fit the devices.
    """

    model: CLIP | CLIPConfig | TextPair | TextPairConfig
    optimizer: optax.GradientTransformation
    batch_size: int
    devices: int = 1
    cache: GradCacheConfig = NO_CACHE
    implementation: str = "xla"
    loss: str = "clip"
    parameter_sharding: str = "replicated"
    frozen: tuple[str, ...] = ()
    unlocked_groups: UnlockedGroups = ALL_LOCKED
    precomputed: tuple[str, ...] = ()
    ema: bool = False
    sample_bytes: int = 0
    passages: int = 1
    teacher: TeacherMemory | None = None
    by_id: bool = False
    packings: Mapping[str, Packing] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        supported = loss_class(self.loss).implementations
        check_choice("parameter_sharding", self.parameter_sharding, PARAMETER_SHARDINGS)
        check_frozen(self.frozen, self.unlocked_groups)
        check_choice(f"implementation of the {self.loss} loss", self.implementation, supported)
        if self.devices < 1:
            raise ValueError(f"expected devices >= 1, got {self.devices}")
        if self.batch_size < 1 or self.batch_size % self.devices:
            raise ValueError(
                f"expected batch_size to be a multiple of the {self.devices} devices, got {self.batch_size}"
            )
        self.cache.check_batch(self.batch_size, self.devices)
        if isinstance(self.model, CLIPConfig | TextPairConfig):
            object.__setattr__(self, "model", build_model(self.model))

    def with_cache(self, **changes: Any) -> Self:
        """Return a copy with changed settings of gradient caching."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, **changes))

    @property
    def frozen_parameters(self) -> frozenset[str]:
        """Names of the frozen parameters."""
        return frozen_parameters(parameter_shapes(cast(CLIP, self.model)), self.frozen, self.unlocked_groups)

    def rows(self, name: str) -> "EncoderRows":
        """Return the rows of an encoder on one device; a `TextPair` has `passages` of each query."""
        block = self.block_rows * (self.passages if name == "passage" else 1)
        chunk = self.cache.chunk_of(name)
        shard = block if chunk is None else min(chunk // self.devices, block)
        return EncoderRows(block, shard, block if chunk is None else min(block, self.cache.keep * shard))

    @property
    def block_rows(self) -> int:
        """Rows of the batch on one device."""
        return self.batch_size // self.devices

    @property
    def shard_rows(self) -> int:
        """Rows of a full chunk on one device; all of its rows without caching."""
        return self.rows("query").shard

    @property
    def stored_rows(self) -> int:
        """Rows on one device that are not recomputed; all of its rows without caching."""
        return self.rows("query").stored


class EncoderRows(NamedTuple):
    """Rows of one encoder on one device."""

    block: int  # its rows of the batch
    shard: int  # rows of a full chunk; all rows without caching
    stored: int  # rows that are not recomputed; all rows without caching


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a training step in bytes on each device.

    Examples:
      >>> plan = plan_memory(Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64))
      >>> plan.optimizer > 2 * plan.parameters, plan.memory_limit
      (True, None)

    Attributes:
      workload: settings of the step.
      parameters: model parameters; one device's shard with "fsdp".
      optimizer: optimizer state; one device's shard with "fsdp".
      ema: moving averages of the parameters; one device's shard with "fsdp".
      samples: sample state of a global contrastive loss.
      teacher: parameters and features of the teacher.
      gradients: gradients accumulated over chunks. With "fsdp" also the gathered parameters. With offload "host" or
        "replay" also the encoders' copy of the parameters and the gradients of the loss's own use of them.
      updates: optimizer updates, separate from the accumulated gradients.
      batch: images and texts of the current batch; of two chunks with offload "host" or "replay".
      next_batch: images and texts of the next batch or chunk, whose transfer overlaps the computation.
      features: features of the batch in the model's feature dtype, and their gradients.
      stored: stored activations of the rows that are not recomputed, and stored residual streams of the others.
      transient: activations of the recomputed chunk. Without recomputation, transient memory of the backward pass.
      loss: workspace of the loss.
      memory_limit: bytes that JAX may use on a device; None if unknown.
    """

    workload: Workload
    parameters: int
    optimizer: int
    ema: int
    samples: int
    teacher: int
    gradients: int
    updates: int
    batch: int
    next_batch: int
    features: int
    stored: int
    transient: int
    loss: int
    memory_limit: int | None

    @property
    def peak(self) -> int:
        """Peak memory of the step.

        It is the maximum over three phases: the loss, the backward pass of each chunk, and the updates. The backward
        pass needs only the gradients of the features, half of `features`. The updates start after activations and
        features have been freed.
        """
        state = self.parameters + self.optimizer + self.ema + self.samples + self.teacher
        persistent = state + self.gradients + self.batch + self.next_batch
        backward, loss = self.transient + self.features // 2, self.loss + self.features
        return persistent + max(self.stored + max(backward, loss), self.updates)

    @property
    def fits(self) -> bool:
        """Compare the peak with `memory_limit`.

        Raises:
          ValueError: `memory_limit` is None.
        """
        if self.memory_limit is None:
            raise ValueError("expected the memory limit of a device, got None; pass it in bytes or name the device")
        return self.peak <= self.memory_limit


@planned_device()
def plan_memory(workload: Workload, memory_limit: int | None = None) -> MemoryPlan:
    """Plan the memory of a training step without running it.

    Parameters, optimizer state, gradients, batch and features are exact, from shapes. Activations are estimated from
    the shapes in each encoder's forward and backward jaxpr for 1,024 and 2,048 rows, from which they are linear in the
    rows, see `infcl_jax.planner.activations`.

    Accuracy of peaks, without the next batch: 0.95 to 1.03 of the measured memory of bf16 training steps of ViT-B/32,
    B/16 and L/14 on one and eight H200s, with and without gradient caching and stored chunks; about 0.8 on the CPU,
    which stores more.

    Accuracy of an encoder's activations, against XLA's memory analysis on an H200:

    | encoder | planned / XLA |
    | --- | --- |
    | fused attention, also with remat "dots" | within 2 % |
    | remat "full" | 1/4 too large |
    | stored residual stream, a single chunk | 1/8 too large |
    | attention "xla" in bf16 | 1/8 too small |

    Ops are planned with the kernels that they choose on the current device. To plan for a Hopper GPU on another host,
    call this function under `use_abstract_mesh(device_named("H100").mesh)`.

    Examples:
      >>> cache = GradCacheConfig(chunk_size=512)
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=4096, devices=8, cache=cache)
      >>> plan = plan_memory(run, device_named("H100").memory_limit)
      >>> print(format_plan(plan))
      memory per device: 8 device(s), batch_size 4096, chunk_size 512, implementation xla
      component                     MiB  % of limit  source
      parameters                    0.1         0.0  exact
      optimizer state ...

    Args:
      workload: settings of the training step.
      memory_limit: bytes that JAX may use on a device, such as `device_memory_limit()` or
        `device_named("H100").memory_limit`.
    """
    model, cache = cast(CLIP | TextPair, workload.model), workload.cache
    width, dtype = feature_width(model), jnp.dtype(model.feature_dtype)
    names = workload.frozen_parameters
    state = state_bytes(model, workload.optimizer, workload.devices, workload.parameter_sharding, names)
    encoders = dict(zip(row_shapes(model, 1), encoder_memory(model, names), strict=True))
    frozen = frozen_towers(parameter_shapes(model), names)
    rows = {name: workload.rows(name) for name in encoders}
    trained = [(encoder, rows[name]) for name, encoder in encoders.items() if name not in frozen]
    activations = [_activations(encoder, r, cache.keep_residual) for encoder, r in trained]
    row_bytes = {
        name: width * dtype.itemsize if name in workload.precomputed else encoder.row_bytes
        for name, encoder in encoders.items()
    }
    on_device, teacher = cache.offload == "none", workload.teacher
    loss_rows = workload.batch_size * workload.passages
    return MemoryPlan(
        workload=workload,
        parameters=state.parameter_shard,
        optimizer=state.optimizer,
        ema=state.ema if workload.ema else 0,
        samples=workload.sample_bytes,
        teacher=0 if teacher is None else teacher.persistent(workload.block_rows, workload.passages),
        gradients=state.gradients(on_device),
        updates=state.updates,
        batch=sum(row_bytes[name] * (r.block if on_device else min(r.block, 2 * r.shard)) for name, r in rows.items()),
        next_batch=sum(row_bytes[name] * (r.block if on_device else r.shard) for name, r in rows.items()),
        features=2 * sum(r.block for r in rows.values()) * width * dtype.itemsize,
        stored=sum(stored for stored, _ in activations),
        transient=max(
            *(transient for _, transient in activations),
            *(encoders[name].forward(rows[name].shard) for name in frozen if name not in workload.precomputed),
            0 if teacher is None else teacher.forward(max(r.shard for r in rows.values())),
            0,
        ),
        loss=loss_workspace(workload.implementation, loss_rows, width, dtype, workload.devices, by_id=workload.by_id)
        + (0 if teacher is None else teacher.loss_workspace(workload.implementation, loss_rows, workload.devices)),
        memory_limit=memory_limit,
    )


def utilization(workload: Workload, device_kind: str) -> Callable[[float], float | None]:
    """Return the MFU as a function of the pairs per second, see `infcl_jax.training.compiled_step.utilization`.

    Examples:
      >>> run = Workload(model=model_config("ViT-B/16"), optimizer=optax.adamw(1e-3), batch_size=1024)
      >>> mfu = utilization(run, "NVIDIA H200")
      >>> round(mfu(4000.0), 3)
      0.457

    Args:
      workload: settings of the training step.
      device_kind: name of the devices, from `jax.Device.device_kind`.

    Returns:
      Function from pairs per second, over all devices, to the MFU in [0, 1]; to None if the devices' peak is unknown
      or the model is a `TextPair`.
    """
    if isinstance(workload.model, TextPair):
        return lambda rate: None
    config = config_of(cast(CLIP, workload.model))
    unlocked = {name: getattr(workload.unlocked_groups, name) for name in workload.frozen}
    return compiled_step.utilization(
        config, workload.batch_size, workload.devices, device_kind, unlocked, workload.precomputed
    )


def _activations(encoder: EncoderMemory, rows: EncoderRows, residual_stored: bool) -> tuple[int, int]:
    """Return the stored bytes, and the bytes of one chunk's backward pass beyond them."""
    recomputed = rows.block - rows.stored
    # Reading `residual` traces the encoder, which takes a second or more.
    residual = encoder.residual if residual_stored and recomputed else Linear(0, 0)
    chunk_stored = residual(rows.shard) if recomputed else encoder.stored(rows.shard)
    transient = max(0, encoder.peak(rows.shard) - chunk_stored)
    return encoder.stored(rows.stored) + residual(recomputed), transient
