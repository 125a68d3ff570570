"""Global contrastive losses: SogCLR, iSogCLR and FastCLIP v0 to v3.

Forward and backward each compute the similarities of all pairs once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Integer

from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, over_mesh
from infcl_jax.losses.global_estimator import estimate
from infcl_jax.losses.samples import SampleState, check_index, write_samples
from infcl_jax.losses.variants import Adam, Settings
from infcl_jax.ops.pairwise.checks import check_features, checked_mask


def global_contrastive_loss(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    index: Integer[Array, "b"],
    state: SampleState,
    *,
    variant: str,
    gamma: Float[Array, ""] | float,
    logit_scale: Float[Array, ""] | float | None = None,
    epoch: Integer[Array, ""] | int | None = None,
    temperature_learning_rate: float | None = None,
    temperature_beta1: float = 0.9,
    temperature_beta2: float = 0.999,
    temperature_eps: float = 1e-8,
    rho: float = 0.0,
    eps: float = 1e-14,
    mode: str = "published",
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    implementation: str | None = None,
    rows_only: bool = False,
) -> tuple[Float[Array, ""], SampleState]:
    """Contrastive loss of each sample against the whole dataset.

    The state holds a moving average u of each sample's mean exponential over its negatives. `s_ij` is the similarity of
    image i and text j, and b is the global batch size. The temperatures t1 of images and t2 of texts are per sample, or
    all equal:

        g1_i = 1/(b-1) sum_{j != i} exp((s_ij - s_ii) / t1_i)       u1_i <- (1 - gamma) u1_i + gamma g1_i
        g2_i = 1/(b-1) sum_{j != i} exp((s_ji - s_ii) / t2_i)       u2_i <- (1 - gamma) u2_i + gamma g2_i
        loss = k mean_i(c1_i log(eps + u1_i) + c2_i log(eps + u2_i) + rho (t1_i + t2_i))

    An unseen sample takes `u <- g`. The gradient is the papers' estimator, `d log(eps + u) = dg / (eps + u)`. It is not
    the gradient of the scalar, which depends on earlier batches. Value and gradient do not depend on the device count.
    g and u are computed and stored as logarithms, so that they cannot overflow.

    | variant | c | temperature | rho |
    | --- | --- | --- | --- |
    | "sogclr", "fastclip_v1" | t | constant | |
    | "isogclr", "fastclip_v2" | t | per sample, updated here with Adam | yes |
    | "fastclip_v0" | 1 | single, learned through `logit_scale` | |
    | "fastclip_v3" | t | single, learned through `logit_scale` | yes |

    "sogclr" and "fastclip_v1" differ only in the schedule of `gamma`, as do "isogclr" and "fastclip_v2".

    `mode="published"` follows the papers, with k = 1. `mode="reference"` follows the authors' code, for which their
    settings were tuned:

    - k = 1/2, and c = 1 except for "fastclip_v3";
    - the temperature gradient through the pairs is doubled;
    - the temperature gradient of "fastclip_v3" uses u instead of `eps + u`.

    With `gamma = 1`, `eps = 1 / (b - 1)`, k = 1/2 and c = 1 this is `clip_loss - log(b - 1)`.

    Yuan et al., "Provable Stochastic Optimization for Global Contrastive Learning" (SogCLR); Qiu et al., "Not All
    Semantics are Created Equal" (iSogCLR); Wei et al., "FastCLIP", section 4 and Algorithm 1.

    Examples:
      >>> index, state = jnp.arange(8), create_samples(1000)  # samples of this batch, state of the whole dataset
      >>> def loss_fn(image, text, scale, state):
      ...     return global_contrastive_loss(
      ...         image, text, index, state, variant="fastclip_v3", gamma=0.8, rho=6.5, logit_scale=scale
      ...     )
      >>> gradient_fn = jax.value_and_grad(loss_fn, argnums=(0, 1, 2), has_aux=True)
      >>> (loss, state), gradients = jax.jit(gradient_fn)(image, text, 14.3, state)
      >>> print(int(jnp.isfinite(state.log_u[:, 0]).sum()), "samples seen")
      8 samples seen

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      index: int `[b]`, dataset sample of each row. If a sample occurs twice in the batch, each row's gradient uses its
        own u, and the state stores the u of the last row.
      state: sample state from `create_samples`, with `temperature` for variants with per-sample temperatures.
      variant: one of `infcl_jax.losses.variants.VARIANTS`.
      gamma: scalar in [0, 1], weight of the new g in the moving average. With 0, u of a seen sample never changes. The
        factor g / (eps + u) of the gradient is at most 1 / gamma.
      logit_scale: scalar inverse of the single temperature; None for variants with per-sample temperatures.
      epoch: int, number of completed epochs, for Adam's bias correction; per-sample temperatures only.
      temperature_learning_rate: learning rate of per-sample temperatures; None for other variants.
      temperature_beta1: decay of the first moment of per-sample temperatures, in [0, 1); 0 is used in the first epoch.
        FastCLIP's code uses beta1, beta2 and eps of the parameters' optimizer.
      temperature_beta2: decay of the second moment of per-sample temperatures, in [0, 1); 0 is used in the first epoch.
      temperature_eps: added to the square root of the second moment of per-sample temperatures.
      rho: weight of the temperatures in the loss; only for variants with rho in the table.
      eps: added to u.
      mode: "published" or "reference".
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which batch and state are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), whose features and index may have any values.
      implementation: backend, see `pairwise_lse`.
      rows_only: return the batch's new state rows instead of the new state. A step of several jitted functions passes
        them to `write_samples` in its last one, the only one that may donate the state.

    Returns:
      The scalar loss in fp32 (fp64 for fp64 features), and the new state (or rows). The loss is NaN if an index is not
      a sample of the state.

    Raises:
      ValueError: shapes, dtypes or settings do not match, a concrete (not traced) index is out of range, or the batch
        size is not divisible by the device count.
    """
    check_pairs(image, text)
    check_features(image, text)
    settings = Settings(
        name=variant,
        mode=mode,
        eps=float(eps),
        rho=float(rho),
        temperature_learning_rate=None if temperature_learning_rate is None else float(temperature_learning_rate),
        temperature_adam=Adam(float(temperature_beta1), float(temperature_beta2), float(temperature_eps)),
        implementation=implementation,
    )
    settings.check_call(state, logit_scale, epoch)
    # The index check needs the mask of the caller, because `checked_mask` returns a tracer under jit.
    in_shard_map, concrete_mask = axis_name is not None and mesh is None, mask
    mask = checked_mask("mask", mask, image.shape[0])
    if index.shape != image.shape[:1] or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            f"expected index to be integers of shape ({len(image)},), got {index.dtype}{list(index.shape)}"
        )
    if not in_shard_map:  # where a shard of the state does not bound the global index
        check_index(index, concrete_mask, state)
    index = jnp.asarray(index).astype(jnp.int32)
    if not isinstance(gamma, jax.Array) and not 0 <= gamma <= 1:
        raise ValueError(f"expected 0 <= gamma <= 1, got {gamma}")
    scalars = tuple(
        None if value is None else checked_scalar(name, value, image)
        for name, value in (("gamma", gamma), ("logit_scale", logit_scale), ("epoch", epoch))
    )
    sharded = (image, text, index, lax.stop_gradient(state), mask)
    loss, rows = over_mesh(
        estimate, settings, sharded, scalars, axis_name=axis_name, mesh=mesh, sharded_result=(False, True)
    )
    if rows_only:
        return loss, rows
    index = index if mask is None else jnp.where(mask, index, jnp.full_like(index, -1))
    return loss, write_samples(state, index, rows, axis_name=axis_name, mesh=mesh)
