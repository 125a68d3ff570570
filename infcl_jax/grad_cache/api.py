"""Validation and dispatch of `cached_value_and_grad`."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from infcl_jax.grad_cache import device
from infcl_jax.grad_cache.chunks import Array, CachedEncoder, Devices, EncodeFn, LossFn
from infcl_jax.grad_cache.host import HostDriver, Replay
from infcl_jax.ops.common.checks import check_choice

OFFLOADS = ("none", "host")
_NUMBERS = (bool, int, float, complex)

ValueAndGrad = Callable[..., tuple[Any, Any]]


def cached_value_and_grad(
    encoders: Mapping[str, EncodeFn],
    loss_fn: Callable[[Any, dict[str, Any]], Any],
    *,
    chunk_size: int | Mapping[str, int],
    keep: int | Mapping[str, int] = 0,
    keep_names: Collection[str] = (),
    frozen: Collection[str] = (),
    has_aux: bool = False,
    offload: str = "none",
    sharding: NamedSharding | None = None,
) -> ValueAndGrad:
    """Value and gradient of a full-batch loss with gradient caching.

    The first pass encodes every chunk without storing activations. The backward pass of the loss gives the cotangents
    of the features. The second pass encodes every chunk again, now with activations, and accumulates the gradients of
    the parameters. The result is the exact gradient of `loss_fn(params, {name: features})`.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache), section
    3.3.

    Encoders must be pure functions, so they cannot update running statistics. An encoder that mixes rows, such as batch
    norm in training, mixes one device's shard of a chunk instead of the batch. The result is then the
    exact gradient of this chunked function.

    Randomness: both passes call an encoder with the key `fold_in(fold_in(rng, encoder), shard)`. `encoder` is the index
    of the encoder in `encoders`. `shard` is the index of a device's shard of a chunk in the order of the batch's rows:
    `d k + chunk` on device d with k chunks. The key does not depend on `offload` or `keep`.

    With offload "none", values derived from the parameters alone, such as casts, are computed once for all chunks
    if the encoder names them `DERIVED`: `jax.ad_checkpoint.checkpoint_name(kernel.astype(dtype), DERIVED)`.

    Examples:
      >>> def encode(params, chunk, rng):  # an encoder of your own: Flax, Equinox or plain JAX
      ...     return l2_normalize(chunk @ params, jnp.float32)
      >>> def loss_fn(params, features):
      ...     return clip_loss(features["image"], features["text"], 14.3)
      >>> step = jax.jit(cached_value_and_grad({"image": encode, "text": encode}, loss_fn, chunk_size=2))
      >>> loss, gradient = step(jnp.eye(4), {"image": image, "text": text})  # 4 chunks of 2 pairs
      >>> print(f"{loss:.2f}", gradient.shape)
      0.39 (4, 4)

    Args:
      encoders: `{name: encode(params, chunk, rng) -> features}`. `chunk` is a slice of the batch entry of that name.
        `features` is an array or a pytree of floating arrays with one row per row of the chunk. Encoders may share
        parameters. With `sharding` they run inside `shard_map` on one device's rows.
      loss_fn: `loss_fn(params, features) -> scalar`, or `(scalar, aux)` with `has_aux`. `features[name]` has all rows
        in the order of the batch. Batch entries without an encoder are passed through in `features`. Gradients include
        the loss's own use of `params`, such as a logit scale.
      chunk_size: rows encoded at once, over all devices; or `{name: rows}`. A smaller last chunk is compiled
        separately.
      keep: number of chunks, or `{name: number}`, whose activations are stored instead of recomputed. If it is at least
        the number of chunks, nothing is recomputed. With offload "none" every such chunk is compiled separately, so
        compile time grows with `keep`. One chunk of twice the size needs the memory of two and runs faster, but a
        larger `chunk_size` also enlarges the chunks that are recomputed.
      keep_names: names of checkpointed values (`checkpoint_name`) that all other chunks store, so that the second pass
        recomputes less. Choose values that are small and expensive to recompute: a transformer's residual stream is an
        eighth of its activations and saves 5/12 of the forward GEMMs: the output projections of attention and MLP.
        Names that an encoder does not use have no effect.
      frozen: names of frozen encoders, which run once, with `stop_gradient` on their parameters. Precomputed features
        need no encoder: pass them as a batch entry that `loss_fn` reads.
      has_aux: whether `loss_fn` returns `(scalar, aux)`, as in `jax.value_and_grad`.
      offload: where the batch is stored. With "none" it is in device memory, and the returned function is one program
        to be called under `jax.jit`. With "host" it is in host memory: entries are NumPy arrays or `Replay`,
        each process passes its own rows, and at most three chunks are in device memory at a time. The returned function
        must not be jitted. It returns before the gradients are ready; do not modify the batch's arrays until they are.
        Each chunk with stored activations stores its own copy of values derived from the parameters, such as casts.
      sharding: `NamedSharding(mesh, P(axes))` of the batch's leading axis; None for one device. Rows never move between
        devices, and gradients are reduced over devices once per step. The parameters are replicated over `axes`.
        Without `sharding`, every device gathers and encodes every chunk of a sharded batch, so such a batch causes a
        warning.

    Returns:
      `f(params, batch, rng=None, frozen_params=None) -> (loss, gradients)`, or `((loss, aux), gradients)` with
      `has_aux`. `batch` is `{name: pytree of arrays with one leading axis}`; entries may differ in length. Gradients
      have the floating dtypes of `params` and are accumulated over chunks in at least fp32. Without `rng`, encoders get
      None as their key. `frozen_params` are replicated parameters without gradient, such as the frozen layers of an
      encoder: encoders and `loss_fn` get `(params, frozen_params)` in place of `params`.

    Raises:
      ValueError: arguments do not match each other. When called: the batch does not match the encoders, or the rows or
        `chunk_size` are not divisible by the device count.
    """
    check_choice("offload", offload, OFFLOADS)
    cached = _cached_encoders(encoders, chunk_size, keep, keep_names, frozen)
    devices = Devices(sharding)
    loss = _with_aux(loss_fn, has_aux)
    driver = HostDriver(cached, loss, devices) if offload == "host" else None

    def value_and_grad(
        params: Any, batch: Mapping[str, Any], rng: Array | None = None, frozen_params: Any = None
    ) -> tuple[Any, Any]:
        _check_call(cached, params, batch, rng)
        params = jax.tree.map(jnp.asarray, params)
        if driver is not None:
            (value, aux), grads = driver(params, batch, rng, frozen_params)
        else:
            _check_no_replay(batch, "with offload 'none'", batch)
            if sharding is None:
                _warn_of_missing_sharding([batch[encoder.name] for encoder in cached])
            arguments = params, batch, rng, frozen_params
            (value, aux), grads = device.value_and_grad(cached, loss, devices, *arguments)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad


def _cached_encoders(
    encoders: Mapping[str, EncodeFn], chunk_size: Any, keep: Any, keep_names: Collection[str], frozen: Collection[str]
) -> tuple[CachedEncoder, ...]:
    """Check the settings and distribute them to the encoders."""
    if not encoders:
        raise ValueError("expected at least one encoder, got none")
    for option, names in (("frozen", frozen), ("keep_names", keep_names)):
        if isinstance(names, str):
            raise ValueError(f"expected {option} to be a collection of names, got {names!r}; use {(names,)!r}")
    _check_names("frozen", frozen, encoders)
    chunk_sizes = _per_encoder("chunk_size", chunk_size, encoders, least=1)
    stored_chunks = _per_encoder("keep", keep, encoders, least=0)
    stored_chunks |= dict.fromkeys(frozen, 0)  # without a second pass, nothing is stored for it
    stored_names = {name: () if name in frozen else tuple(keep_names) for name in encoders}
    return tuple(
        CachedEncoder(name, index, encode, chunk_sizes[name], stored_chunks[name], stored_names[name], name in frozen)
        for index, (name, encode) in enumerate(encoders.items())
    )


def _per_encoder(option: str, value: Any, encoders: Mapping[str, EncodeFn], least: int) -> dict[str, int]:
    """Expand a setting to one integer per encoder."""
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(encoders, value)
    _check_names(option, values, encoders)
    if missing := [name for name in encoders if name not in values]:
        raise ValueError(f"expected {option} for every encoder, got none for {missing}")
    for name, number in values.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"expected {option} of {name!r} to be an integer of at least {least}, got {number!r}")
    return values


def _check_names(option: str, names: Collection[str], encoders: Mapping[str, EncodeFn]) -> None:
    if unknown := [name for name in names if name not in encoders]:
        raise ValueError(f"expected {option} to name encoders among {list(encoders)}, got {unknown}")


def _check_call(cached: tuple[CachedEncoder, ...], params: Any, batch: Mapping[str, Any], rng: Array | None) -> None:
    if missing := [encoder.name for encoder in cached if encoder.name not in batch]:
        raise ValueError(f"expected a batch entry for every encoder, got {list(batch)} without {missing}")
    names = [encoder.name for encoder in cached]
    _check_no_replay([name for name in batch if name not in names], "without an encoder", batch)
    for path, leaf in jax.tree.leaves_with_path(params):
        kind = jnp.result_type(leaf) if hasattr(leaf, "dtype") or isinstance(leaf, _NUMBERS) else type(leaf).__name__
        if isinstance(kind, str) or not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(
                f"expected floating parameters, got {kind} at {jax.tree_util.keystr(path)}; separate the rest of a "
                "model from them, with nnx.split(model, nnx.Param, ...) or eqx.partition(model, eqx.is_inexact_array)"
            )
    if rng is not None and (not hasattr(rng, "dtype") or not _is_key(rng)):
        raise ValueError(f"expected rng to be one PRNG key, jax.random.key(seed), got {rng!r}")


def _check_no_replay(names: Collection[str], where: str, batch: Mapping[str, Any]) -> None:
    if replayed := [name for name in names if isinstance(batch[name], Replay)]:
        raise ValueError(f"expected arrays in batch entries {where}, got Replay for {replayed}")


def _warn_of_missing_sharding(entries: list[Any]) -> None:
    """Warn if an entry's arrays are on a mesh of several devices."""
    for leaf in jax.tree.leaves(entries):
        mesh = jax.typeof(leaf).sharding.mesh
        axes = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
        if any(mesh.shape[axis] > 1 for axis in axes):
            warnings.warn(
                f"expected sharding for a batch on a mesh of {dict(mesh.shape)}, got None: every device encodes every "
                f"row; pass sharding=NamedSharding(mesh, PartitionSpec({axes[0]!r})) to cached_value_and_grad",
                stacklevel=3,
            )
            return


def _is_key(rng: Array) -> bool:
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.shape == ()
    return rng.dtype == jnp.uint32 and rng.ndim == 1


def _with_aux(loss_fn: Callable[..., Any], has_aux: bool) -> LossFn:
    """Wrap `loss_fn` to always return `(value, aux)` with a checked value."""

    def loss(params: Any, features: dict[str, Any]) -> tuple[Array, Any]:
        value, aux = loss_fn(params, features) if has_aux else (loss_fn(params, features), None)
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ValueError(
                f"expected loss_fn to return a floating scalar{' and aux' if has_aux else ''}, got "
                f"{jnp.result_type(value)}{list(jnp.shape(value))}"
            )
        return value, aux

    return loss
