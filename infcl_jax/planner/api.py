"""The memory of one training step by part."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from infcl_jax.checks import check_choice
from infcl_jax.grad_cache import RESIDENCIES
from infcl_jax.models import CLIP, TOWERS, CLIPConfig, build_model
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS
from infcl_jax.planner.activations import Tower, towers
from infcl_jax.planner.devices import planned_device
from infcl_jax.planner.loss import compiled_workspace, loss_workspace
from infcl_jax.planner.state import state_bytes
from infcl_jax.training.sharding import PARAMETER_SHARDINGS
from infcl_jax.training.step import LOSSES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how.

    Attributes:
      model: a `CLIP` module, or its configuration.
      optimizer: whose state and updates are counted.
      batch_size: b, global.
      devices: n, over which the batch is sharded; everything else is on every one of them, but for "fsdp".
      chunk_size: rows encoded at once, over all devices; None: the whole batch, no gradient caching.
      keep: chunks whose activations are kept from the first pass.
      keep_residual: whether the other chunks keep their residual streams.
      residency: "device": batches are on the devices, the one in use and the next. "host" and "replay": two chunks are,
        and the next.
      implementation: of the loss, one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      loss: "clip", also for the global contrastive losses, or "siglip".
      parameter_sharding: "replicated" or "fsdp", see `infcl_jax.training.create_state`.
      frozen: towers that are not trained, "image" or "text".
      sample_bytes: on each device, of what a global contrastive loss remembers of all samples.

    Raises:
      ValueError: an unknown name, a number out of its range, or rows that the devices cannot share evenly.
    """

    model: CLIP | CLIPConfig
    optimizer: optax.GradientTransformation
    batch_size: int
    devices: int = 1
    chunk_size: int | None = None
    keep: int = 0
    keep_residual: bool = False
    residency: str = "device"
    implementation: str = "xla"
    loss: str = "clip"
    parameter_sharding: str = "replicated"
    frozen: tuple[str, ...] = ()
    sample_bytes: int = 0

    def __post_init__(self) -> None:
        check_choice("residency", self.residency, (*RESIDENCIES, "replay"))
        check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        check_choice("loss", self.loss, LOSSES)
        check_choice("parameter_sharding", self.parameter_sharding, PARAMETER_SHARDINGS)
        for name in self.frozen:
            check_choice("frozen", name, tuple(TOWERS))
        if self.loss == "siglip":
            check_choice("implementation of the siglip loss", self.implementation, ("ring", "xla"))
        if self.devices < 1 or self.keep < 0:
            raise ValueError(f"expected devices >= 1 and keep >= 0, got {self.devices} and {self.keep}")
        for name in ("batch_size", "chunk_size"):
            rows = getattr(self, name)
            if rows is not None and (rows < 1 or rows % self.devices):
                raise ValueError(f"expected {name} to be a multiple of the {self.devices} devices, got {rows}")
        if self.chunk_size is None and (self.keep or self.keep_residual or self.residency != "device"):
            raise ValueError(
                f"expected a chunk_size with keep={self.keep}, keep_residual={self.keep_residual} and "
                f"residency={self.residency!r}, got None"
            )
        if isinstance(self.model, CLIPConfig):
            object.__setattr__(self, "model", build_model(self.model))

    @property
    def rows(self) -> int:
        """Rows of the batch on one device."""
        return self.batch_size // self.devices

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk on one device; of the batch without caching."""
        return self.rows if self.chunk_size is None else min(self.rows, self.chunk_size // self.devices)

    @property
    def kept_rows(self) -> int:
        """Rows on one device that are encoded once; all of them without caching."""
        return self.rows if self.chunk_size is None else min(self.rows, self.keep * self.chunk_rows)


class Source(NamedTuple):
    """How a figure was obtained: what it counts, and whether exactly."""

    counts: str
    method: str


EXACT, TRACED, FORMULA, COMPILED = "exact", "traced", "formula", "compiled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on each device.

    Attributes:
      workload: what was planned.
      parameters: of the model; with "fsdp" this device's part.
      optimizer: its state; likewise.
      samples: what a global contrastive loss remembers.
      gradients: their sums over chunks; driven from the host, or with "fsdp", also the parameters' copy for the
        encoders.
      updates: the gradients that are scaled or turned into updates, beside their sums.
      batch: images and texts of the batch in use; of two chunks where it is not on the devices.
      next_batch: of the batch, or the chunk, that is on its way meanwhile.
      features: of the batch, in the model's feature dtype, and their gradients.
      kept: activations of the rows that are encoded once, and residual streams of the others.
      activations: of the chunk whose gradient is computed; without one, what backward needs for a moment.
      loss: workspace of the loss.
      loss_method: "formula" or "compiled".
      memory: what JAX may use of a device; None: not known.
    """

    workload: Workload
    parameters: int
    optimizer: int
    samples: int
    gradients: int
    updates: int
    batch: int
    next_batch: int
    features: int
    kept: int
    activations: int
    loss: int
    loss_method: str
    memory: int | None

    @property
    def sources(self) -> dict[str, Source]:
        """How each figure was obtained. "traced": from the shapes in the encoders' jaxpr, see `plan_memory`."""
        return {
            "parameters": Source("parameters", EXACT),
            "optimizer": Source("optimizer state", EXACT),
            "samples": Source("state of the samples", EXACT),
            "gradients": Source("gradients", EXACT),
            "batch": Source("batch", EXACT),
            "next_batch": Source("next batch on its way", EXACT),
            "features": Source("features, their gradients", EXACT),
            "kept": Source("activations kept", TRACED),
            "activations": Source("activations at a time", TRACED),
            "loss": Source("loss workspace", self.loss_method),
            "updates": Source("updates", EXACT),
        }

    @property
    def total(self) -> int:
        """The most at one time.

        The loss comes before a chunk's activations, beside which only the gradients of the features are left; the
        updates come when all that has gone.
        """
        state = self.parameters + self.optimizer + self.samples
        lasting = state + self.gradients + self.batch + self.next_batch
        encoding, loss = self.activations + self.features // 2, self.loss + self.features
        return lasting + max(self.kept + max(encoding, loss), self.updates)

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory known.

        Raises:
          ValueError: the memory is not known.
        """
        if self.memory is None:
            raise ValueError("expected the memory of a device, which this one does not tell; give it, or its name")
        return self.total <= self.memory


def plan_memory(workload: Workload, memory: int | None = None, mesh: Mesh | None = None) -> MemoryPlan:
    """Where the memory of a training step goes, without running it.

    Parameters, optimizer state, gradients, batch and features are exact, from shapes. Activations come from shapes,
    too, of tracing each encoder forward and backward: what is stored counts from where it is computed to where it is
    last used. On H200s, without the next batch, the total was 0.95 to 1.03 of what training steps of ViT-B/32, B/16 and
    L/14 took in bf16, with caching and kept chunks and without, on one and on eight. What XLA plans for an encoder's
    activations there is met within 2 % with fused attention, also with remat "dots"; with remat "full" the figure is a
    quarter too large, with the residual stream kept of a single chunk an eighth, with attention "xla" in bf16 an eighth
    too small. On the CPU, which stores more, totals are about 0.8 of what is needed. Attention None is planned as it
    runs on the device at hand; for a Hopper GPU from elsewhere, plan under
    `use_abstract_mesh(device_named("H100").mesh)`.

    Example:
      >>> run = Workload(model=model_config("ViT-B/16"), optimizer=optax.adamw(1e-3), batch_size=32768, devices=8,
      ...                chunk_size=2048, implementation="mosaic_gpu")
      >>> print(format_plan(plan_memory(run, device_named("H100").usable)))

    Args:
      workload: what to plan.
      memory: bytes that JAX may use of a device, such as `memory_at_hand()` or `device_named("H100").usable`.
      mesh: of `workload.devices` devices: the loss is compiled for them. None: its workspace by `loss_workspace`.

    Raises:
      ValueError: the mesh has another number of devices, or the loss does not run on them.
    """
    rows, chunk, kept_rows = workload.rows, workload.chunk_rows, workload.kept_rows
    state = state_bytes(
        workload.model, workload.optimizer, workload.devices, workload.parameter_sharding, workload.frozen
    )
    with planned_device():
        encoders = dict(zip(TOWERS, towers(cast(CLIP, workload.model)), strict=True))
    trained = [tower for name, tower in encoders.items() if name not in workload.frozen]
    row = sum(tower.row for tower in encoders.values())
    on_device = workload.residency == "device"
    again = kept_rows < rows
    partly_kept_rows = rows - kept_rows if workload.keep_residual else 0
    return MemoryPlan(
        workload=workload,
        parameters=state.part,
        optimizer=state.optimizer,
        samples=workload.sample_bytes,
        gradients=state.gradients(on_device),
        updates=state.updates,
        batch=row * (rows if on_device else min(rows, 2 * chunk)),
        next_batch=row * (rows if on_device else chunk),
        features=2 * len(encoders) * rows * _width(workload.model) * _feature_dtype(workload.model).itemsize,
        kept=sum(tower.kept(kept_rows) + tower.residual(partly_kept_rows) for tower in trained),
        activations=max(
            *(_at_a_time(tower, chunk, again, workload.keep_residual) for tower in trained),
            *(encoders[name].forward(chunk) for name in workload.frozen),
        ),
        loss=_workspace(workload, mesh),
        loss_method=FORMULA if mesh is None else COMPILED,
        memory=memory,
    )


def compare_with_compiled(plan: MemoryPlan, compiled: jax.stages.Compiled) -> float:
    """The plan's total over what XLA plans for the compiled training step, both without the next batch.

    Args:
      plan: of a step with the batch on the devices, which is one program.
      compiled: `step.lower(state, batch).compile()`.

    Raises:
      ValueError: the plan is of a step that is driven from the host, in several programs.
    """
    if plan.workload.residency != "device":
        raise ValueError(f"expected a plan with residency 'device', got {plan.workload.residency!r}")
    return (plan.total - plan.next_batch) / compiled_bytes(compiled)


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of one device that a program needs, as XLA plans them; what it overwrites counts once."""
    memory = compiled.memory_analysis()
    given, made = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return given + made + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def _at_a_time(tower: Tower, chunk: int, again: bool, partly_kept: bool) -> int:
    """A chunk that is encoded again has its activations beside those kept; kept ones are already counted."""
    if not again:
        return tower.momentary(chunk)
    return tower.peak(chunk) - (tower.residual(chunk) if partly_kept else 0)


def _workspace(workload: Workload, mesh: Mesh | None) -> int:
    model = workload.model
    arguments = (workload.implementation, workload.batch_size, _width(model), _feature_dtype(model))
    if mesh is None:
        return loss_workspace(*arguments, workload.devices)
    if mesh.size != workload.devices:
        raise ValueError(f"expected a mesh of {workload.devices} devices, got {mesh.size}")
    return compiled_workspace(*arguments, mesh, workload.loss)


def _width(model: Any) -> int:
    return model.visual.embed_dim


def _feature_dtype(model: Any) -> jnp.dtype:
    return jnp.dtype(model.feature_dtype)
