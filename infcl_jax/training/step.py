"""One training step: encode, global loss through the ring, update."""

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.checks import check_choice, check_implementation
from infcl_jax.grad_cache import RESIDENCIES, Replay, cached_value_and_grad
from infcl_jax.losses import SampleState, clip_loss, siglip_loss
from infcl_jax.models import RESIDUAL, TOWERS, CLIPOutput
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS
from infcl_jax.training.global_contrastive import GlobalContrastive
from infcl_jax.training.sharding import PARAMETER_SHARDINGS, constrain
from infcl_jax.training.state import TrainState, trained

Metrics = dict[str, Any]
LossFn = Callable[[CLIPOutput], jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]

LOSSES = ("clip", "siglip")


class Result(NamedTuple):
    """What metrics tell of a loss besides its value, and what is to be remembered.

    Attributes:
      logit_scale: of the model.
      finite: whether the features of each tower are finite numbers. The features themselves are not held on to.
      samples: index and new state of each row's sample; None for losses that remember nothing.
      batch_stats: new running statistics of batch normalisation, None for models without.
    """

    logit_scale: jax.Array
    finite: dict[str, jax.Array]
    samples: tuple[jax.Array, SampleState] | None = None
    batch_stats: Any = None


# (state, batch, key) -> ((loss, result), gradients)
Gradients = Callable[[TrainState, Mapping[str, Any], jax.Array], tuple[tuple[jax.Array, Result], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradCacheConfig:
    """Gradient caching of a run, see `infcl_jax.cached_value_and_grad`.

    Attributes:
      chunk_size: pairs whose activations are in memory at a time, over all devices; None: the whole batch, no caching.
      keep: chunks whose activations are kept from the first pass, so that they need no second one; what that costs:
        `infcl_jax.cached_value_and_grad`.
      keep_residual: whether the other chunks keep their transformers' residual streams, from which the second pass
        computes the rest.
      residency: "device": the batch is on the devices. "host": in host memory, and visits the devices chunk by chunk.
        "replay": nowhere; it is read again, chunk by chunk, in the second pass (see `replayed`).

    Raises:
      ValueError: a value out of its range, or one that has no effect without caching.
    """

    chunk_size: int | None = None
    keep: int = 0
    keep_residual: bool = False
    residency: str = "device"

    def __post_init__(self) -> None:
        check_choice("grad_cache.residency", self.residency, (*RESIDENCIES, "replay"))
        if self.keep < 0:
            raise ValueError(f"expected grad_cache.keep >= 0, got {self.keep}")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"expected grad_cache.chunk_size >= 1 or None, got {self.chunk_size}")
        if self.chunk_size is None and (self.keep or self.keep_residual or self.residency != "device"):
            raise ValueError(
                f"expected grad_cache.chunk_size with keep={self.keep}, keep_residual={self.keep_residual} and "
                f"residency={self.residency!r}, got None, which is training without gradient caching"
            )

    @property
    def keep_names(self) -> tuple[str, ...]:
        """As of `infcl_jax.cached_value_and_grad`."""
        return (RESIDUAL,) if self.keep_residual else ()


NO_CACHE = GradCacheConfig()


def make_loss(name: str, mesh: Mesh, implementation: str | None = None) -> LossFn:
    """The loss of a run as a function of the model's output over the global batch.

    Args:
      name: "clip" or "siglip" (which needs a model with a logit bias). `GlobalContrastive` makes the others.
      mesh: devices over which the batch is sharded.
      implementation: see `infcl_jax.pairwise_lse`.

    Raises:
      ValueError: unknown name or implementation; when called, a model without the bias that "siglip" needs.
    """
    check_choice("loss", name, LOSSES)
    check_implementation(implementation, IMPLEMENTATIONS)

    def loss(output: CLIPOutput) -> jax.Array:
        image, text, scale, bias = output
        if name == "clip":
            return clip_loss(image, text, scale, mesh=mesh, implementation=implementation)
        if bias is None:
            raise ValueError("the siglip loss needs a model with a logit bias; set model_overrides init_logit_bias=-10")
        return siglip_loss(image, text, scale, bias, mesh=mesh, implementation=implementation)

    return loss


def make_train_step(
    loss_fn: LossFn | GlobalContrastive,
    seed: int,
    cache: GradCacheConfig = NO_CACHE,
    mesh: Mesh | None = None,
    parameter_sharding: str = "replicated",
) -> TrainStep:
    """The compiled step `(state, {"image", "text"}) -> (state, metrics)`; the state given is consumed.

    Global contrastive losses also need `"index"`, the sample of each pair, and the state's `samples`.

    Batch normalisation sees the global batch; with gradient caching one device's share of a chunk, and its running
    statistics then follow the first chunk of each step. Those of a frozen tower stay.

    Dropout and patch dropout draw from `seed` and the step, so a resumed run repeats them. The state's frozen towers
    are encoded as in training, but once, and have no gradient. Metrics are scalars on the device: `loss`, `logit_scale`
    (both before the update), `grad_norm`; and under `finite`, whether each stage of the step held only finite numbers,
    in order of computation. Where samples have temperatures of their own, `logit_scale` is the inverse of the batch's
    mean.

    Args:
      loss_fn: from `make_loss`, or a `GlobalContrastive`.
      seed: of the dropout keys.
      cache: gradient caching. With residency "host" or "replay" the batch is this process's rows as NumPy arrays, which
        must not be changed before the metrics have been read, or as `replayed`; otherwise arrays on the devices.
      mesh: devices over whose first axis the batch is sharded; None: one device.
      parameter_sharding: as the state was created with. With "fsdp" every step gathers the parameters to compute with,
        and each device updates its own part with its own part of the gradient.

    Raises:
      ValueError: another `parameter_sharding`, or "fsdp" without a mesh; a global contrastive loss with residency
        "replay".
    """
    check_choice("parameter_sharding", parameter_sharding, PARAMETER_SHARDINGS)
    if mesh is None and parameter_sharding == "fsdp":
        raise ValueError("expected a mesh with parameter_sharding 'fsdp', got None")
    memory = loss_fn if isinstance(loss_fn, GlobalContrastive) else None
    if memory and cache.residency == "replay":
        raise ValueError(f"expected residency 'device' or 'host' with {memory.variant}, got 'replay'")
    gradients = _direct(loss_fn, mesh) if cache.chunk_size is None else _cached(loss_fn, cache, mesh)

    def key_of(step: jax.Array | int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed), step)

    def finish(state: TrainState, loss: jax.Array, result: Result, grads: Any) -> tuple[TrainState, Metrics]:
        changes = {} if result.batch_stats is None else {"batch_stats": result.batch_stats}
        if memory and result.samples:
            changes["samples"] = memory.write(state.samples, *result.samples)
        grads = constrain(grads, mesh, parameter_sharding)
        after = state.apply_gradients(grads=grads, **changes)
        params, opt_state = constrain((after.params, after.opt_state), mesh, parameter_sharding)
        return after.replace(params=params, opt_state=opt_state), _metrics(loss, result, grads)

    def on_device(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        whole = state.replace(params=constrain(state.params, mesh, "replicated"))
        (loss, result), grads = gradients(whole, batch, key_of(state.step))
        return finish(state, loss, result, grads)

    if cache.residency == "device":
        return jax.jit(on_device, donate_argnums=0)
    compiled_key, compiled_finish = jax.jit(key_of), jax.jit(finish, donate_argnums=0)

    def from_host(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        (loss, result), grads = gradients(state, batch, compiled_key(state.step))
        return compiled_finish(state, loss, result, grads)

    return from_host


def evaluate_loss(
    loss_fn: LossFn | GlobalContrastive, output: CLIPOutput, memory: Mapping[str, Any]
) -> tuple[jax.Array, Result]:
    """The loss, of the model's output alone or with its `memory_of`.

    Args:
      loss_fn: from `make_loss`, or a `GlobalContrastive`.
      output: of the model for the global batch, features `[b, D]`.
      memory: of `memory_of`; other entries are not used.

    Returns:
      The loss, a scalar, and what is known besides, with index and new state of the batch's samples for a
      `GlobalContrastive`.
    """
    result = Result(output.logit_scale, {name: jnp.isfinite(getattr(output, name)).all() for name in TOWERS})
    if not isinstance(loss_fn, GlobalContrastive):
        return loss_fn(output), result
    index = memory["index"]
    loss, rows = loss_fn(output, index, memory["samples"], memory["step"])
    return loss, result._replace(samples=(index, rows))


def memory_of(loss_fn: LossFn | GlobalContrastive, state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the loss needs besides the model's output.

    Args:
      loss_fn: from `make_loss`, or a `GlobalContrastive`.
      state: of the run, with `samples` for a `GlobalContrastive`.
      batch: of the step, then with `"index"`, int `[b]`: the sample of each pair.

    Returns:
      `{"index", "samples", "step"}` for a `GlobalContrastive`, nothing for other losses.

    Raises:
      ValueError: the state or the batch lacks it.
    """
    if not isinstance(loss_fn, GlobalContrastive):
        return {}
    if state.samples is None or "index" not in batch:
        raise ValueError(f"expected a state with samples and a batch with an index for {loss_fn.variant}, got none")
    return {"index": batch["index"], "samples": state.samples, "step": state.step}


def _direct(loss_fn: LossFn | GlobalContrastive, mesh: Mesh | None) -> Gradients:
    """Gradients with the activations of the whole batch."""

    def gradients(state: TrainState, batch: Mapping[str, Any], key: jax.Array) -> tuple:
        memory = memory_of(loss_fn, state, batch)

        def model(params: Any) -> tuple[CLIPOutput, Any]:
            variables = state.variables | {"params": {**state.params, **params}}
            return state.apply_fn(
                variables, batch["image"], batch["text"], train=True, rngs={"dropout": key}, mutable=["batch_stats"]
            )

        # The mesh is for infcl_jax.ops.embedding.embed_tokens. The loss is given its own.
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            output, pull, changed = jax.vjp(model, state.trained, has_aux=True)
        evaluate = functools.partial(evaluate_loss, loss_fn, memory=memory)
        (loss, result), slopes = jax.value_and_grad(evaluate, has_aux=True)(output)
        statistics = None if "image" in state.frozen else changed.get("batch_stats")
        return (loss, result._replace(batch_stats=statistics)), pull(slopes)[0]

    return gradients


def _cached(loss_fn: LossFn | GlobalContrastive, cache: GradCacheConfig, mesh: Mesh | None) -> Gradients:
    """The same gradients chunk by chunk."""
    sharding = None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))

    @functools.cache  # what is compiled for the host's chunks belongs to one model
    def of_model(apply_fn: Callable, frozen: tuple[str, ...]) -> Callable:
        def encoder(method: str) -> Callable:
            def encode(params: Any, chunk: Any, key: jax.Array) -> jax.Array:
                return apply_fn({"params": params}, chunk, train=True, method=method, rngs={"dropout": key})

            return encode

        def loss(params: Any, features: dict[str, Any]) -> tuple[jax.Array, Result]:
            scalars = apply_fn({"params": params}, method="logit_scale_and_bias")
            return evaluate_loss(loss_fn, CLIPOutput(features["image"], features["text"], *scalars), features)

        return cached_value_and_grad(
            {"image": encoder("encode_image"), "text": encoder("encode_text")},
            loss,
            chunk_size=cache.chunk_size,
            keep=cache.keep,
            keep_names=cache.keep_names,
            frozen=frozen,
            has_aux=True,
            residency="device" if cache.residency == "device" else "host",
            sharding=sharding,
        )

    def gradients(state: TrainState, batch: Mapping[str, Any], key: jax.Array) -> tuple:
        pairs = {name: batch[name] for name in ("image", "text")}
        encode = of_model(state.apply_fn, state.frozen)
        (loss, result), grads = encode(state.params, pairs | memory_of(loss_fn, state, batch), key)
        if state.batch_stats is not None and "image" not in state.frozen:
            first = _first_chunk(batch["image"], cache, sharding)
            result = result._replace(batch_stats=_statistics(state.apply_fn, state.variables, first, key))
        return (loss, result), trained(grads, state.frozen)

    return gradients


@functools.partial(jax.jit, static_argnums=0)
def _statistics(apply_fn: Callable, variables: Any, image: jax.Array, key: jax.Array) -> Any:
    """The running statistics of batch normalisation after some images."""
    settings = {"train": True, "method": "encode_image", "rngs": {"dropout": key}, "mutable": ["batch_stats"]}
    return apply_fn(variables, image, **settings)[1]["batch_stats"]


def _first_chunk(image: Any, cache: GradCacheConfig, sharding: NamedSharding | None) -> Any:
    """The rows of a batch that move the running statistics, as an array on the devices."""
    if cache.residency == "device":
        return image[: cache.chunk_size]
    rows = image.load(0) if isinstance(image, Replay) else image[: cache.chunk_size // jax.process_count()]
    return jax.device_put(rows) if sharding is None else jax.make_array_from_process_local_data(sharding, rows)


def _metrics(loss: jax.Array, result: Result, grads: Any) -> Metrics:
    own = result.samples and result.samples[1].temperature
    norms = {name: optax.tree.norm(grad) for name, grad in grads.items()}
    values = {"the loss": loss, **{f"the gradient of {name}": norm for name, norm in norms.items()}}
    # Ordered, because jit sorts the keys of a plain dict.
    finite = OrderedDict((f"{name} features", flag) for name, flag in result.finite.items())
    finite.update((stage, jnp.isfinite(value)) for stage, value in values.items())
    return {
        "loss": loss,
        "logit_scale": result.logit_scale if own is None else 1 / own.mean(),
        "grad_norm": optax.tree.norm(norms),
        "finite": finite,
    }


def check_finite(step: int, metrics: Metrics) -> None:
    """Stops a run whose numbers are no longer numbers.

    Args:
      step: the step of the metrics.
      metrics: of `make_train_step`, on the host.

    Raises:
      FloatingPointError: something was not finite; the message names the first such stage of the step.
    """
    bad = [stage for stage, finite in metrics["finite"].items() if not finite]
    if bad:
        raise FloatingPointError(
            f"step {step}: {bad[0]} became NaN or infinite (loss {float(metrics['loss']):.4g}, logit scale "
            f"{float(metrics['logit_scale']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}); resume from an "
            "earlier checkpoint with a lower learning rate, a longer warm-up or a smaller clip_norm"
        )
