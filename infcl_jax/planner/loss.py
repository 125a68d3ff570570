"""Workspace of the loss and its gradient.

The workspace excludes the features, their gradients and the parameters. `loss_workspace` evaluates the formula of an
implementation. `compiled_workspace` compiles the loss for the current devices. Accuracy of the formulas, as measured on
GPUs in docs/benchmarks.md:

| implementation | formula / measured |
| --- | --- |
| `mosaic_gpu` | 0.75 to 1.2; 1.6 for 8,192 rows per device or fewer |
| `xla`, `dense` on one GPU | 0.95 to 1.1 |
| `triton` | 0.6 to 0.9 |
| `xla`, `dense` on several GPUs; `local`, `disco`, `ring` | not measured |

On the CPU XLA plans two to four times the formula.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.checks import check_choice
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.pairwise_lse.implementations import IMPLEMENTATIONS, TABLE
from infcl_jax.training import loss_class, make_loss


def loss_workspace(implementation: str, batch_size: int, width: int, dtype: Any, devices: int = 1) -> int:
    """Estimate the workspace in bytes on each device by the implementation's formula.

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      devices: number of devices n over which the batch is sharded.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    return TABLE[implementation].workspace_bytes(batch_size // devices, width, dtype, devices)


def compiled_workspace(
    implementation: str | None, batch_size: int, width: int, dtype: Any, mesh: Mesh, loss: str = "clip"
) -> int:
    """Workspace in bytes on each device, from XLA's memory analysis.

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`; None for the best on these devices.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      mesh: mesh of current devices; the batch is sharded over its first axis.
      loss: training loss, one of `infcl_jax.training.LOSSES`.

    Raises:
      ValueError: the implementation, the batch size or the loss does not run on the devices.
    """
    # Losses with sample state need further inputs. They name the loss with the same workspace.
    loss_fn = make_loss(loss_class(loss).workspace or loss, mesh, implementation)

    def shape(dims: tuple[int, ...], dtype: Any, *axes: str) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    features = shape((batch_size, width), dtype, mesh.axis_names[0])
    scalar = shape((), jnp.float32)
    step = jax.jit(jax.value_and_grad(lambda output: loss_fn(output).value))
    output = CLIPOutput(features, features, scalar, scalar)
    return step.lower(output).compile().memory_analysis().temp_size_in_bytes
