"""`cached_value_and_grad`: validation, and the choice between the device and the host form."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from infcl_jax.checks import check_choice
from infcl_jax.grad_cache import device
from infcl_jax.grad_cache.chunks import Array, Devices, Encoder, LossFn, Tower
from infcl_jax.grad_cache.host import HostDriver, Replay

RESIDENCIES = ("device", "host")

ValueAndGrad = Callable[..., tuple[Any, Any]]


def cached_value_and_grad(
    encoders: Mapping[str, Encoder],
    loss_fn: Callable[[Any, dict[str, Any]], Any],
    *,
    chunk_size: int | Mapping[str, int],
    keep: int | Mapping[str, int] = 0,
    keep_names: Collection[str] = (),
    frozen: Collection[str] = (),
    has_aux: bool = False,
    residency: str = "device",
    sharding: NamedSharding | None = None,
) -> ValueAndGrad:
    """`jax.value_and_grad` of a loss over the features of a whole batch, with the activations of one chunk at a time.

    Every chunk is encoded without keeping activations; the loss gives the gradient of the features; every chunk is
    then encoded again with activations and its features' gradient is pulled back to the parameters. The result is the
    gradient of `loss_fn(params, {name: features})`, not an approximation. Gao et al., "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup" (GradCache), section 3.3.

    Encoders must be pure functions. One that mixes rows, like batch norm in training, sees the statistics of one
    device's share of a chunk and not those of the batch: the chunked computation is then another function than the
    whole one, and the gradient, still exact, is the gradient of the chunked one. Updated running statistics have no way
    out of an encoder.

    Randomness: an encoder gets `fold_in(fold_in(rng, encoder), share)` in both passes, where `encoder` is its position
    in `encoders`, and `share` numbers the shares that the devices have of the chunks in the order of the batch's rows:
    on one device the number of the chunk, on device d of n with k chunks `d k + chunk`. Residency and `keep` do not
    change it.

    Casts of parameters and the like are computed once for all chunks, if residency is "device", where the encoder calls
    them `DERIVED`: `jax.ad_checkpoint.checkpoint_name(kernel.astype(dtype), DERIVED)`.

    Example:
      >>> encoders = {
      ...     "image": lambda params, chunk, rng: model.apply(params, chunk, method="encode_image"),
      ...     "text": lambda params, chunk, rng: model.apply(params, chunk, method="encode_text"),
      ... }
      >>> def loss(params, f):
      ...     return clip_loss(f["image"], f["text"], jnp.exp(params["params"]["logit_scale"]), mesh=mesh)
      >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
      >>> step = jax.jit(cached_value_and_grad(encoders, loss, chunk_size=256, sharding=sharding))
      >>> value, gradients = step(params, {"image": images, "text": tokens})  # sharded over the devices of the mesh

    Args:
      encoders: `{name: encode(params, chunk, rng) -> features}`; `chunk` is a part of the batch entry of that name and
        `features` an array or a pytree of floating arrays with a row for each of its rows. Several may use the same
        parameters. With `sharding` they see one device's rows and run inside `shard_map`.
      loss_fn: `loss_fn(params, features) -> scalar`, or `(scalar, aux)` with `has_aux`. `features[name]` has all rows,
        in the order of the batch; batch entries without an encoder are in `features` as they are. What it uses of
        `params` (a logit scale) is differentiated too.
      chunk_size: rows that are encoded at once, over all devices; or `{name: rows}`. A last chunk that is smaller is
        compiled separately.
      keep: number of chunks, or `{name: number}`, whose activations are kept from the first pass, so that they need no
        second one. As many as there are chunks, or more: nothing is computed twice. With residency "device" every kept
        chunk is compiled for itself, so compile time grows with `keep`. One kept chunk twice as large needs the same
        memory as two and computes faster; but those encoded again are then larger too.
      keep_names: of values (`checkpoint_name`) that every other chunk keeps too, so that the second pass computes only
        what else it needs. Worth it for what is small and dear: a transformer's residual stream is an eighth of its
        activations and saves the products that lead into it, 5 of 12 parts of the forward pass's. An encoder without
        such names keeps nothing more.
      frozen: names of encoders that are not trained: encoded once, without a gradient, as with `stop_gradient` on their
        parameters. (Features computed beforehand need no encoder: pass them as a batch entry that `loss_fn` reads.)
      has_aux: as in `jax.value_and_grad`.
      residency: "device": the batch is on the devices; everything is one computation, to be called under `jax.jit`.
        "host": entries are NumPy arrays or `Replay`, chunks visit the devices one after the other with at most three
        there at a time, and the function returned must not be jitted. It returns before the gradients are there; the
        arrays of the batch must not be changed before. With several processes each passes its own rows. Each kept chunk
        holds its own copy of what the encoder derives from the parameters, such as casts.
      sharding: `NamedSharding(mesh, P(axes))` of the batch's leading axis; None for one device. No row changes its
        device, and the gradients are summed over devices once per step. The parameters are replicated over `axes`.
        Without it, XLA gathers every chunk of a sharded batch and every device encodes all of it. A batch on several
        devices without `sharding` therefore gives a warning.

    Returns:
      `f(params, batch, rng=None) -> (loss, gradients)`, or `((loss, aux), gradients)`. `batch` is `{name: pytree of
      arrays with one leading axis}`; entries may differ in length. Gradients have the dtypes of `params`, floating, and
      are summed over chunks in at least fp32. Encoders get None for `rng` if there is none.

    Raises:
      ValueError: an argument that does not fit the others; when called, a batch that does not fit the encoders, or
        `chunk_size` and rows that the devices cannot share evenly.
    """
    check_choice("residency", residency, RESIDENCIES)
    towers = _make_towers(encoders, chunk_size, keep, keep_names, frozen)
    devices = Devices(sharding)
    loss = _with_aux(loss_fn, has_aux)
    driver = HostDriver(towers, loss, devices) if residency == "host" else None

    def value_and_grad(params: Any, batch: Mapping[str, Any], rng: Array | None = None) -> tuple[Any, Any]:
        _check_call(towers, params, batch, rng)
        params = jax.tree.map(jnp.asarray, params)
        if driver is not None:
            (value, aux), grads = driver(params, batch, rng)
        else:
            _check_no_replay(batch, "with residency 'device'", batch)
            if sharding is None:
                _warn_of_missing_sharding([batch[tower.name] for tower in towers])
            (value, aux), grads = device.value_and_grad(towers, loss, devices, params, batch, rng)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad


def _make_towers(
    encoders: Mapping[str, Encoder], chunk_size: Any, keep: Any, keep_names: Collection[str], frozen: Collection[str]
) -> tuple[Tower, ...]:
    if not encoders:
        raise ValueError("expected at least one encoder, got none")
    for option, names in (("frozen", frozen), ("keep_names", keep_names)):
        if isinstance(names, str):
            raise ValueError(f"expected {option} to be a collection of names, got {names!r}; use {(names,)!r}")
    _check_names("frozen", frozen, encoders)
    sizes = _per_encoder("chunk_size", chunk_size, encoders, least=1)
    kept = _per_encoder("keep", keep, encoders, least=0)
    kept |= dict.fromkeys(frozen, 0)  # what has no gradient is encoded once anyway
    named = {name: () if name in frozen else tuple(keep_names) for name in encoders}
    return tuple(
        Tower(name, number, encode, sizes[name], kept[name], named[name], name in frozen)
        for number, (name, encode) in enumerate(encoders.items())
    )


def _per_encoder(option: str, value: Any, encoders: Mapping[str, Encoder], least: int) -> dict[str, int]:
    """A number for every encoder out of one for all or one for each."""
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(encoders, value)
    _check_names(option, values, encoders)
    if missing := [name for name in encoders if name not in values]:
        raise ValueError(f"expected {option} for every encoder, got none for {missing}")
    for name, number in values.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"expected {option} of {name!r} to be an integer of at least {least}, got {number!r}")
    return values


def _check_names(option: str, names: Collection[str], encoders: Mapping[str, Encoder]) -> None:
    if unknown := [name for name in names if name not in encoders]:
        raise ValueError(f"expected {option} to name encoders among {list(encoders)}, got {unknown}")


def _check_call(towers: tuple[Tower, ...], params: Any, batch: Mapping[str, Any], rng: Array | None) -> None:
    if missing := [tower.name for tower in towers if tower.name not in batch]:
        raise ValueError(f"expected a batch entry for every encoder, got {list(batch)} without {missing}")
    names = [tower.name for tower in towers]
    _check_no_replay([name for name in batch if name not in names], "without an encoder", batch)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"expected floating parameters, got {jnp.result_type(leaf)} at {jax.tree_util.keystr(path)}"
            )
    if rng is not None and (not hasattr(rng, "dtype") or not _is_key(rng)):
        raise ValueError(f"expected rng to be one PRNG key, jax.random.key(seed), got {rng!r}")


def _check_no_replay(names: Collection[str], where: str, batch: Mapping[str, Any]) -> None:
    if replayed := [name for name in names if isinstance(batch[name], Replay)]:
        raise ValueError(f"expected arrays in batch entries {where}, got Replay for {replayed}")


def _warn_of_missing_sharding(entries: list[Any]) -> None:
    """Warns of entries whose arrays are on a mesh of several devices."""
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
    """`loss_fn` with an auxiliary output in any case, and its value checked."""

    def loss(params: Any, features: dict[str, Any]) -> tuple[Array, Any]:
        value, aux = loss_fn(params, features) if has_aux else (loss_fn(params, features), None)
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ValueError(
                f"expected loss_fn to return a floating scalar{' and aux' if has_aux else ''}, got "
                f"{jnp.result_type(value)}{list(jnp.shape(value))}"
            )
        return value, aux

    return loss
