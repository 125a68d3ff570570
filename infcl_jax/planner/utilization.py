"""Model FLOPs utilization (MFU) of a workload."""

from collections.abc import Callable
from typing import cast

from infcl_jax.models import CLIP, TextPair
from infcl_jax.models.convert import config_of
from infcl_jax.planner.api import Workload
from infcl_jax.training import utilization as training


def utilization(workload: Workload, device_kind: str) -> Callable[[float], float | None]:
    """Return the MFU as a function of the pairs per second, see `infcl_jax.training.utilization`.

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
    return training.utilization(
        config, workload.batch_size, workload.devices, device_kind, unlocked, workload.precomputed
    )
