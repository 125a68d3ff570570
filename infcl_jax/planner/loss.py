"""Workspace of the loss and its gradient.

The workspace excludes the features, their gradients and the parameters. Each implementation has a formula. Accuracy of
the formulas, as measured on GPUs in docs/benchmarks.md:

| implementation | formula / measured |
| --- | --- |
| `mosaic_gpu` | 0.75 to 1.2; 1.6 for 8,192 rows per device or fewer |
| `xla`, `dense` on one GPU | 0.95 to 1.1 |
| `triton` | 0.6 to 0.9 |
| `xla`, `dense` on several GPUs; `local`, `disco`, `ring` | not measured |

On the CPU XLA plans two to four times the formula.
"""

from typing import Any

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise_lse.implementations import IMPLEMENTATIONS, TABLE


def loss_workspace(
    implementation: str, batch_size: int, width: int, dtype: Any, devices: int = 1, *, by_id: bool = False
) -> int:
    """Estimate the workspace in bytes on each device by the implementation's formula.

    Examples:
      >>> names = ("mosaic_gpu", "local")
      >>> [loss_workspace(name, 65_536, 512, jnp.bfloat16, devices=8) // 2**20 for name in names]  # MiB
      [132, 8608]

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      devices: number of devices n over which the batch is sharded.
      by_id: whether positives are given by id. The fused kernels then sort the features. The workspace excludes the
        sorted copies, which take the place of the features in a training step.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    return TABLE[implementation].workspace_bytes(batch_size // devices, width, dtype, devices, by_id=by_id)
