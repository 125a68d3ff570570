"""Train state of CLIP models: parameters, their moving averages (EMA), optimizer state and step."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training import train_state
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float32, Integer

from infcl_jax.models import MAX_LOGIT_SCALE, clamp_logit_scale
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.training.frozen import (
    ALL_LOCKED,
    UnlockedGroups,
    check_frozen,
    frozen_parameters,
    frozen_towers,
    merge,
    partition,
)
from infcl_jax.training.sharding import PARAMETER_SHARDINGS, shardings

# timm's `ModelEmaV3`: after update t, the warm-up limits the decay to 1 - t^-power.
_WARMUP_POWER = 2 / 3
_SCALE_TOLERANCE = 1.001  # files store log 100 rounded to 4.6052, a scale of 100.003
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """Settings of the moving average.

    Examples:
      >>> EMAConfig(decay=0.9999, warmup=True).decay
      0.9999

    Attributes:
      decay: weight of the previous average in each update, in [0, 1).
      warmup: whether the decay rises from 0 to `decay`: it is at most `1 - t^(-2/3)` after update t. Without warm-up,
        the average of a run of fewer than some `1 / (1 - decay)` steps keeps much of the initial parameters.

    Raises:
      ValueError: `decay` is out of range.
    """

    decay: float
    warmup: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"expected 0 <= ema_decay < 1, got {self.decay}")


def initial_ema(variables: Any) -> Any:
    """Copy variables to fp32, as the average before the first update."""
    return jax.tree.map(lambda value: jnp.array(value, jnp.float32), variables)


def updated_ema(config: EMAConfig, ema: Any, variables: Any, update: Integer[Array, ""] | int) -> Any:
    """Update the average: `ema <- decay ema + (1 - decay) variables`, at the end of update 1, 2, ...

    Running statistics of batch normalization are averaged too, as by timm's `ModelEmaV3`.
    """
    decay: Float32[Array, ""] | float = config.decay
    if config.warmup:
        decay = jnp.minimum(decay, 1.0 - jnp.asarray(update, jnp.float32) ** -_WARMUP_POWER)
    rate = 1.0 - decay
    # In this form, variables that do not change keep their average bit for bit.
    return jax.tree.map(lambda mean, value: mean + rate * (value.astype(jnp.float32) - mean), ema, variables)


def evaluated_variables(variables: Mapping[str, Any], ema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Choose the variables to evaluate or export: the averages where there are some.

    Examples:
      >>> average = jax.tree.map(jnp.zeros_like, variables)
      >>> chosen = evaluated_variables(variables, average)
      >>> float(chosen["params"]["logit_scale"])
      0.0

    Args:
      variables: parameters and running statistics of a state or a checkpoint.
      ema: its averages, which lack frozen parameters; None for a run without `ema_decay`.

    Returns:
      Variables with the structure and dtypes of `variables`.
    """

    def averaged(value: Any, mean: Any) -> Any:
        if isinstance(mean, Mapping):
            return {**value, **{name: averaged(value[name], mean[name]) for name in mean}}
        return mean.astype(value.dtype)

    return dict(variables) if ema is None else averaged(variables, ema)


class TrainState(train_state.TrainState):
    """Flax train state of a CLIP model.

    `step`, `params` and `opt_state` are arrays; `apply_fn`, `tx` and `frozen` are static.

    Examples:
      >>> optimizer = make_optimizer(OptimizerConfig(), total_steps=10)
      >>> state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)
      >>> int(state.step), sorted(state.params)
      (0, ['logit_scale', 'text', 'visual'])

    Attributes:
      batch_stats: running statistics of batch normalization; None for models without it.
      samples: sample state of a global contrastive loss (`infcl_jax.SampleState`); None for other losses.
      ema: fp32 moving averages of the trained parameters and the running statistics; None without them.
      ema_config: decay of `ema`.
      frozen: names of the frozen parameters, see `infcl_jax.training.frozen`. `opt_state` excludes them.
    """

    batch_stats: Any = None
    samples: Any = None
    ema: Any = None
    ema_config: EMAConfig | None = struct.field(pytree_node=False, default=None)
    frozen: frozenset[str] = struct.field(pytree_node=False, default=frozenset())

    @classmethod
    def create(cls, *, params: Any, frozen: frozenset[str] = frozenset(), **fields: Any) -> "TrainState":
        """Create a state at step 0, with optimizer state and averages for the trained parameters."""
        trained, _ = partition(params, frozen)
        state = super().create(params=trained, frozen=frozen, **fields)
        state = state.replace(params=params, step=jnp.zeros((), jnp.int32))  # a Python int would have a weak type
        return state if state.ema_config is None else state.replace(ema=initial_ema(state.averaged))

    @property
    def trained(self) -> dict[str, Any]:
        """Parameters that are not frozen."""
        return partition(self.params, self.frozen)[0]

    @property
    def frozen_towers(self) -> tuple[str, ...]:
        """Towers whose parameters are all frozen, keys of `infcl_jax.models.TOWERS`."""
        return frozen_towers(self.params, self.frozen)

    @property
    def variables(self) -> dict[str, Any]:
        """Flax variables of the model: parameters and running statistics."""
        return {"params": self.params} | ({} if self.batch_stats is None else {"batch_stats": self.batch_stats})

    @property
    def averaged(self) -> dict[str, Any]:
        """Variables of which `ema` has the moving averages."""
        return self.variables | {"params": self.trained}

    @property
    def evaluated_variables(self) -> dict[str, Any]:
        """Flax variables to evaluate: the moving averages if the state has them."""
        return evaluated_variables(self.variables, self.ema)

    def apply_gradients(self, *, grads: Any, max_logit_scale: float = MAX_LOGIT_SCALE, **changes: Any) -> "TrainState":
        """Apply one optimizer step, clamp the logit scale and update the moving averages.

        Args:
          grads: gradients of the trained parameters.
          max_logit_scale: limit of the logit scale, see `infcl_jax.models.clamp_logit_scale`.
          **changes: new values of other fields.
        """
        state = super(TrainState, self.replace(params=self.trained)).apply_gradients(grads=grads, **changes)
        params = merge(self.params, state.params)
        state = state.replace(params=_limited(params, max_logit_scale))
        if state.ema_config is None:
            return state
        return state.replace(ema=updated_ema(state.ema_config, state.ema, state.averaged, state.step))

    def with_limited_scale(self, max_logit_scale: float) -> "TrainState":
        """Cut an initial logit scale above the limit, with a warning."""
        scale = float(jnp.exp(self.params["logit_scale"])) if "logit_scale" in self.params else 0.0
        if scale <= max_logit_scale * _SCALE_TOLERANCE:
            return self
        _logger.warning(
            "logit scale %.4g of the initial parameters is above max_logit_scale=%g; it is cut", scale, max_logit_scale
        )
        state = self.replace(params=_limited(self.params, max_logit_scale))
        return state if state.ema_config is None else state.replace(ema=initial_ema(state.averaged))


def _limited(params: Mapping[str, Any], max_logit_scale: float) -> Mapping[str, Any]:
    """Clamp the logit scale, which a `TextPair` has as a constant."""
    return clamp_logit_scale(params, max_logit_scale) if "logit_scale" in params else params


@dataclasses.dataclass(frozen=True)
class StateInit:
    """Initialization of a train state.

    Attributes:
      shapes: the state, with the shape, dtype and sharding of each array (`jax.ShapeDtypeStruct`).
      create: function that returns the state.
    """

    shapes: TrainState
    create: Callable[[], TrainState]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tx: optax.GradientTransformation,
        rows: Sequence[jax.ShapeDtypeStruct],
        seed: int,
        mesh: Mesh,
        parameter_sharding: str = "replicated",
        frozen: Collection[str] = (),
        unlocked_groups: UnlockedGroups = ALL_LOCKED,
        ema: EMAConfig | None = None,
    ) -> "StateInit":
        """Return the initialization of a state on a mesh for inputs of the shapes `rows`; see `create_state`."""
        check_choice("parameter_sharding", parameter_sharding, PARAMETER_SHARDINGS)
        check_frozen(frozen, unlocked_groups)

        def with_optimizer(variables: Any) -> TrainState:
            params, statistics = variables["params"], variables.get("batch_stats")
            fields = {"tx": tx, "batch_stats": statistics, "ema_config": ema}
            fields["frozen"] = frozen_parameters(params, frozen, unlocked_groups)
            return TrainState.create(apply_fn=model.apply, params=params, **fields)

        drawn = jax.jit(lambda: model.lazy_init(jax.random.key(seed), *rows)).trace()
        shapes = jax.eval_shape(with_optimizer, drawn.out_info)
        sharded = shardings(shapes, mesh, parameter_sharding)
        placed = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, sharded)

        def create() -> TrainState:
            variables = jax.tree.map(_place, _draw(drawn), shardings(drawn.out_info, mesh, parameter_sharding))
            return jax.jit(with_optimizer, out_shardings=sharded)(variables)

        return cls(placed, create)

    def with_samples(self, init_samples: Callable[[], Any], sharding: NamedSharding) -> "StateInit":
        """Add the sample state that a function returns, with the sharding of its arrays."""
        shapes = jax.tree.map(lambda shape: shape.update(sharding=sharding), jax.eval_shape(init_samples))
        return StateInit(self.shapes.replace(samples=shapes), lambda: self.create().replace(samples=init_samples()))


def _draw(traced: Any) -> Any:
    """Evaluate a traced initialization on the default device.

    A single program would compile each of its hundreds of draws. Op by op, draws of equal shape share a program.
    """
    live, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))  # without the forward pass
    # Only where a caller traces, as for the shapes of `create_state`: it makes counters of random bits constants of
    # the programs, which are then as large as the parameters and take long to store in the compilation cache.
    tracing = isinstance(jnp.zeros(()), jax.core.Tracer)
    with jax.ensure_compile_time_eval() if tracing else contextlib.nullcontext():
        leaves = jaxpr_as_fun(traced.jaxpr.replace(jaxpr=live))()
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), leaves)


def _place(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Place an array that every process has."""
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)


def create_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: int,
    context_length: int,
    seed: int,
    mesh: Mesh,
    parameter_sharding: str = "replicated",
    frozen: Collection[str] = (),
    unlocked_groups: UnlockedGroups = ALL_LOCKED,
    ema: EMAConfig | None = None,
) -> TrainState:
    """Initialize a train state on a mesh.

    The initial values do not depend on the number of devices.

    Examples:
      >>> optimizer = make_optimizer(OptimizerConfig(), total_steps=10)
      >>> state = create_state(model, optimizer, image_size=16, context_length=36, seed=0, mesh=mesh, frozen=["image"])
      >>> sorted(state.frozen)[:2]
      ['visual/class_embedding', 'visual/conv1/kernel']

    Args:
      model: a `CLIP` or `TextPair` module.
      tx: optimizer.
      image_size: side of the square input images, in pixels; 0 for a `TextPair`, which has none.
      context_length: tokens per text.
      seed: seed of the initial parameters.
      mesh: devices that hold the state.
      parameter_sharding: "replicated": every device holds the whole state. "fsdp": every large array, optimizer moments
        and moving averages included, is sharded over the devices; see `infcl_jax.training.sharding.sharded_axis`.
      frozen: towers to freeze, "image" or "text" (LiT, Zhai et al. 2022). They have no gradients, optimizer moments or
        weight decay, and run in inference mode.
      unlocked_groups: trained groups at the end of each frozen tower.
      ema: moving averages of the parameters; None: none.

    Raises:
      ValueError: `parameter_sharding` or a tower is unknown, or `unlocked_groups` names a tower that is not frozen.
    """
    text = jax.ShapeDtypeStruct((1, context_length), jnp.int32)
    first = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.uint8) if image_size else text
    return StateInit.of(model, tx, (first, text), seed, mesh, parameter_sharding, frozen, unlocked_groups, ema).create()


def parameter_count(params: Any) -> int:
    """Count the scalar parameters.

    Examples:
      >>> parameter_count({"kernel": jnp.zeros((16, 8)), "bias": jnp.zeros(8)})
      136
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))
