"""Training step: encode, compute the loss of the global batch, update."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.grad_cache import Replay, cached_value_and_grad
from infcl_jax.losses import Loss, SampleState
from infcl_jax.losses.base import SAMPLE_INPUTS, TEACHER_INPUTS
from infcl_jax.models import TEXT_TOWERS, TOWERS, CLIPOutput, TextPairOutput, towers_of
from infcl_jax.ops.color import adjusted
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.training.frozen import PrecomputedFeatures, merge, module_modes, partition, updates_statistics
from infcl_jax.training.grad_cache import NO_CACHE, GradCacheConfig
from infcl_jax.training.nonfinite import ON_NONFINITE, select_update, state_stages, written_index
from infcl_jax.training.sharding import PARAMETER_SHARDINGS, constrain
from infcl_jax.training.state import TrainState

Metrics = dict[str, Any]
TrainStep = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]


class Auxiliary(NamedTuple):
    """Auxiliary outputs of the loss: metrics and new state; see `infcl_jax.losses.LossOutput`."""

    logit_scale: jax.Array
    finite: dict[str, jax.Array]  # of the features of each tower, which themselves would stay in memory
    extra_positives: jax.Array | None = None
    distillation: jax.Array | None = None
    samples: tuple[jax.Array, SampleState] | None = None  # sample index `[b]`, and new sample state of each row
    batch_stats: Any = None  # new running statistics of batch normalization; None if they do not change


# (state, batch, dropout key) -> ((loss, auxiliary outputs), gradients of the trained parameters)
GradientFn = Callable[[TrainState, Mapping[str, Any], jax.Array], tuple[tuple[jax.Array, Auxiliary], Any]]


def make_train_step(
    loss_fn: Loss,
    seed: int,
    cache: GradCacheConfig = NO_CACHE,
    mesh: Mesh | None = None,
    parameter_sharding: str = "replicated",
    on_nonfinite: str = "stop",
) -> TrainStep:
    """Create the compiled step `(state, {"image", "text"}) -> (state, metrics)`.

    The step donates its input state. Losses with sample state also need `"index"`, the sample index of each pair, in
    the batch, and `samples` in the state. The images can be a `infcl_jax.ops.color.ColorBatch`: the step adjusts their
    colors, with gradient caching in each pass.

    Batch normalization normalizes over the global batch. With gradient caching it normalizes over one device's rows of
    a chunk, and a further forward pass over `chunk_size` images of each step updates the running statistics.

    Dropout and patch dropout keys depend on `seed` and the step alone, so a resumed run draws the same masks.

    Modules with frozen parameters run in inference mode: batch normalization uses its running statistics, which do not
    change, and dropout is off. Frozen towers are encoded once. A batch entry `PrecomputedFeatures` is not encoded.

    Metrics are device scalars: `loss` and `logit_scale` before the update, and `grad_norm`, the global norm before
    clipping. `grad_norm/image` and `grad_norm/text` are the norms of the trained towers. `finite` says whether each
    stage of the step is finite, in order of computation. With per-sample temperatures, `logit_scale` is the inverse of
    their mean over the batch. With positives by id, `extra_positives` is the number of
    positives of the batch in addition to its pairs. With a teacher, `distillation` is the divergence from it.

    With `on_nonfinite="skip"`, a step whose flags are not all true leaves the state as it is, except for `step` and the
    step count of the learning rate schedule. The devices decide, so the host never waits. The flags then also cover
    new running statistics and sample state. All gradients are in memory before the first update.

    Examples:
      >>> optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), total_steps=10)
      >>> state = create_state(model, optimizer, image_size=16, context_length=36, seed=0, mesh=mesh)
      >>> step = make_train_step(make_loss("clip", mesh), seed=0, mesh=mesh)
      >>> batch = shard_batch(mesh, {"image": pixels, "text": tokens})
      >>> state, metrics = step(state, batch)
      >>> int(state.step), sorted(metrics)
      (1, ['finite', 'grad_norm', 'grad_norm/image', 'grad_norm/text', 'logit_scale', 'loss'])

    Args:
      loss_fn: loss from `make_loss`.
      seed: seed of the dropout keys.
      cache: gradient caching. Its offload decides the batch that the step takes. "none": arrays on the devices.
        "host": this process's rows as NumPy arrays, which must not change before the metrics are read. "replay": the
        result of `replayed`.
      mesh: mesh over all of whose axes the batch is sharded; None: one device.
      parameter_sharding: sharding with which the state was created. With "fsdp", every step gathers the parameters, and
        each device updates its shard of the parameters from its shard of the gradient.
      on_nonfinite: "stop": always update; the caller stops, see `check_finite`. "skip": update only if all is finite.

    Raises:
      ValueError: `parameter_sharding` or `on_nonfinite` is unknown, or "fsdp" without a mesh, or the loss has sample
        state and the offload is "replay".
    """
    check_choice("parameter_sharding", parameter_sharding, PARAMETER_SHARDINGS)
    check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
    if mesh is None and parameter_sharding == "fsdp":
        raise ValueError("expected a mesh with parameter_sharding 'fsdp', got None")
    if "index" in loss_fn.inputs and cache.offload == "replay":
        raise ValueError(f"expected offload 'none' or 'host' with {loss_fn.name}, got 'replay'")
    if cache.offload == "replay" and set(TEACHER_INPUTS) & set(loss_fn.batch_inputs):
        raise ValueError("expected offload 'none' or 'host' with a teacher, got 'replay'")
    if loss_fn.targets.by_id and cache.offload == "replay":
        raise ValueError(f"expected offload 'none' or 'host' with {loss_fn.targets}, got 'replay'")
    gradients = _direct(loss_fn, mesh) if cache.chunk_size is None else _cached(loss_fn, cache, mesh)

    def dropout_key(step: jax.Array | int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed), step)

    def update(state: TrainState, loss: jax.Array, aux: Auxiliary, grads: Any) -> tuple[TrainState, Metrics]:
        """Update the state and compute the metrics."""
        changes = {} if aux.batch_stats is None else {"batch_stats": aux.batch_stats}
        if aux.samples is not None:
            changes["samples"] = loss_fn.write(state.samples, *aux.samples)
        grads = constrain(grads, mesh, parameter_sharding)
        updated = state.apply_gradients(grads=grads, max_logit_scale=loss_fn.max_logit_scale, **changes)
        changed = {name: getattr(updated, name) for name in ("params", "opt_state", "ema")}
        return updated.replace(**constrain(changed, mesh, parameter_sharding)), _metrics(loss, aux, grads)

    def update_if_finite(state: TrainState, loss: jax.Array, aux: Auxiliary, grads: Any) -> tuple[TrainState, Metrics]:
        """Update the state if the step is finite, and compute the metrics."""
        grads = constrain(grads, mesh, parameter_sharding)
        metrics = _metrics(loss, aux, grads)
        finite = metrics["finite"]
        finite.update(state_stages(aux.batch_stats, None if aux.samples is None else aux.samples[1]))
        if aux.samples is not None:
            index, rows = aux.samples
            aux = aux._replace(samples=(written_index(finite, index), rows))
        updated, _ = update(state, loss, aux, grads)
        return select_update(finite, updated, state), metrics

    finish = update_if_finite if on_nonfinite == "skip" else update

    def on_device(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        gathered = state.replace(params=constrain(state.params, mesh, "replicated"))
        (loss, aux), grads = gradients(gathered, batch, dropout_key(state.step))
        return finish(state, loss, aux, grads)

    if cache.offload == "none":
        return jax.jit(on_device, donate_argnums=0)
    # Gradient caching in host memory compiles its own functions, so the step as a whole is not compiled.
    compiled_key, compiled_finish = jax.jit(dropout_key), jax.jit(finish, donate_argnums=0)

    def from_host(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        (loss, aux), grads = gradients(state, batch, compiled_key(state.step))
        return compiled_finish(state, loss, aux, grads)

    return from_host


def evaluate_loss(loss_fn: Loss, output: Any, inputs: Mapping[str, Any]) -> tuple[jax.Array, Auxiliary]:
    """Evaluate the loss of a model output for the global batch, with inputs from `loss_inputs`."""
    finite = {name: jnp.isfinite(getattr(output, name)).all() for name in output._fields[:2]}
    result = loss_fn(output, **{name: inputs[name] for name in loss_fn.batch_inputs})
    samples = None if result.rows is None else (inputs["index"], result.rows)
    logit_scale = output.logit_scale if result.logit_scale is None else result.logit_scale
    return result.value, Auxiliary(logit_scale, finite, result.extra_positives, result.distillation, samples)


def loss_inputs(loss_fn: Loss, state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what the loss reads besides the model output; raise `ValueError` if the state or the batch lacks it."""
    available = {**batch, "samples": state.samples, "step": state.step}
    inputs = {name: available.get(name) for name in loss_fn.batch_inputs}
    wanted = dict.fromkeys(SAMPLE_INPUTS, f"a state with samples and a batch with an index for {loss_fn.name}")
    wanted["ids"] = f"a batch with ids for positives={loss_fn.targets.positives!r}"
    wanted["passage_mask"] = f"a batch with passage_mask for {loss_fn.name}"
    wanted |= dict.fromkeys(TEACHER_INPUTS, "a batch with the features of the teacher")
    if missing := [name for name in wanted if inputs.get(name, 0) is None]:
        raise ValueError(f"expected {wanted[missing[0]]}, got none")
    return inputs


def _direct(loss_fn: Loss, mesh: Mesh | None) -> GradientFn:
    """Make a gradient function that encodes the whole batch at once."""

    def gradients(state: TrainState, batch: Mapping[str, Any], key: jax.Array) -> tuple:
        inputs, names = loss_inputs(loss_fn, state, batch), tuple(towers_of(state.params))

        def forward(model: nn.Module) -> Any:
            features = {name: encode_rows(model, name, batch[name], name in state.frozen_towers) for name in names}
            return model_output(features, *model.logit_scale_and_bias())  # type: ignore[attr-defined]

        def model(trained: Any) -> tuple[Any, Any]:
            variables = state.variables | {"params": merge(state.params, trained)}
            with module_modes(state.params, state.frozen):
                return state.apply_fn(variables, method=forward, rngs={"dropout": key}, mutable=["batch_stats"])

        # The abstract mesh tells the encoders' ops how rows are sharded. The loss has its own mesh argument.
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            output, model_vjp, new_variables = jax.vjp(model, state.trained, has_aux=True)
        evaluate = functools.partial(evaluate_loss, loss_fn, inputs=inputs)
        (loss, aux), cotangents = jax.value_and_grad(evaluate, has_aux=True)(output)
        return (loss, aux._replace(batch_stats=new_variables.get("batch_stats"))), model_vjp(cotangents)[0]

    return gradients


def _cached(loss_fn: Loss, cache: GradCacheConfig, mesh: Mesh | None) -> GradientFn:
    """Make a gradient function that encodes chunk by chunk."""
    sharding = None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @functools.cache  # cached by model, so that the functions compiled for host chunks are reused
    def value_and_grad(
        apply_fn: Callable, names: tuple[str, ...], frozen: frozenset[str], towers: tuple[str, ...]
    ) -> Callable:
        def encoder(name: str) -> Callable:
            def encode(variables: tuple[Any, Any], chunk: Any, key: jax.Array) -> jax.Array:
                whole = _whole_variables(*variables)
                with module_modes(whole["params"], frozen):
                    method = functools.partial(encode_rows, name=name, rows=chunk, frozen=name in towers)
                    return apply_fn(whole, method=method, rngs={"dropout": key})

            return encode

        def loss(variables: tuple[Any, Any], features: dict[str, Any]) -> tuple[jax.Array, Auxiliary]:
            scalars = apply_fn(_whole_variables(*variables), method="logit_scale_and_bias")
            return evaluate_loss(loss_fn, model_output(features, *scalars), features)

        return cached_value_and_grad(
            {name: encoder(name) for name in names},
            loss,
            frozen=towers,
            has_aux=True,
            sharding=sharding,
            **cache.options | {"chunk_size": {name: cache.chunk_of(name) for name in names}},
        )

    def gradients(state: TrainState, batch: Mapping[str, Any], key: jax.Array) -> tuple:
        names = tuple(towers_of(state.params))
        pairs = {name: batch[name] for name in names}
        cached = value_and_grad(state.apply_fn, names, state.frozen, state.frozen_towers)
        trained, fixed = partition(state.params, state.frozen)
        constants = state.variables | {"params": fixed}
        if cache.offload != "none" and mesh is not None:
            constants = jax.device_put(constants, NamedSharding(mesh, PartitionSpec()))  # gathered once, not by chunk
        (loss, aux), grads = cached(trained, pairs | loss_inputs(loss_fn, state, batch), key, constants)
        if updates_statistics(state.params, state.batch_stats, state.frozen):
            image = _statistics_images(batch["image"], cache, sharding)
            statistics = _new_statistics(state.apply_fn, state.frozen, state.variables, image, key)
            aux = aux._replace(batch_stats=statistics)
        return (loss, aux), grads

    return gradients


def model_output(features: Mapping[str, jax.Array], scale: jax.Array, bias: jax.Array | None) -> Any:
    """Return the `CLIPOutput` or `TextPairOutput` of features."""
    if "image" in features:
        return CLIPOutput(features["image"], features["text"], scale, bias)
    return TextPairOutput(features["query"], features["passage"], scale)


def encode_rows(model: nn.Module, name: str, rows: Any, frozen: bool) -> jax.Array:
    """Encode images, `ColorBatch` or texts in training mode; `PrecomputedFeatures` are returned as they are.

    XLA compiles a frozen tower apart from the loss, so that its features have the same bits as precomputed ones.
    """
    if isinstance(rows, PrecomputedFeatures):
        return rows.features
    features = getattr(model, f"encode_{name}")(adjusted(rows), train=True)  # texts have no colors
    return jax.lax.optimization_barrier(features) if frozen else features


def _whole_variables(trained: Any, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Join the trained parameters with the other variables of the model."""
    return {**constants, "params": merge(constants["params"], trained)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _new_statistics(apply_fn: Callable, frozen: frozenset[str], variables: Any, image: Any, key: jax.Array) -> Any:
    """Update the running statistics of batch normalization with a batch of images."""
    settings = {"train": True, "method": "encode_image", "rngs": {"dropout": key}, "mutable": ["batch_stats"]}
    with module_modes(variables["params"], frozen):
        return apply_fn(variables, adjusted(image), **settings)[1]["batch_stats"]


def _statistics_images(image: Any, cache: GradCacheConfig, sharding: NamedSharding | None) -> Any:
    """Return `chunk_size` images on the devices, for the running statistics."""
    if cache.offload == "none":
        return jax.tree.map(lambda rows: rows[: cache.chunk_size], image)
    local_rows = cache.chunk_size // jax.process_count()
    rows = image.load(0) if isinstance(image, Replay) else jax.tree.map(lambda rows: rows[:local_rows], image)
    if sharding is None:
        return jax.device_put(rows)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), rows)


def _metrics(loss: jax.Array, aux: Auxiliary, grads: Any) -> Metrics:
    norms = {name: optax.tree.norm(grad) for name, grad in grads.items()}
    values = {"the loss": loss, **{f"the gradient of {name}": norm for name, norm in norms.items()}}
    # An OrderedDict keeps the order of computation; jit sorts the keys of a plain dict.
    finite = OrderedDict((f"{name} features", flag) for name, flag in aux.finite.items())
    finite.update((stage, jnp.isfinite(value)) for stage, value in values.items())
    return {
        "loss": loss,
        "logit_scale": aux.logit_scale,
        "grad_norm": optax.tree.norm(norms),
        **{f"grad_norm/{tower}": norms[module] for tower, module in (TOWERS | TEXT_TOWERS).items() if module in norms},
        **({} if aux.extra_positives is None else {"extra_positives": aux.extra_positives}),
        **({} if aux.distillation is None else {"distillation": aux.distillation}),
        "finite": finite,
    }
