"""Memory and time of training steps, from shapes alone.

A plan lists memory by component. Searches find the largest batch that fits and the gradient caching that recomputes
least. Times come from the measured rates of GPUs.
"""

from infcl_jax.planner.activations import tree_bytes
from infcl_jax.planner.api import MemoryPlan, Workload, plan_memory, utilization
from infcl_jax.planner.devices import DEVICES, Device, device_named
from infcl_jax.planner.loss import loss_time, loss_workspace
from infcl_jax.planner.rates import Rates, rates_of
from infcl_jax.planner.report import (
    describe_plan,
    explain_out_of_memory,
    format_plan,
    format_scaling,
    format_time,
    plan_components,
)
from infcl_jax.planner.search import (
    SAFE_SHARE,
    fitting_plan,
    largest_batch,
    largest_chunk_size,
    largest_keep,
    recommended_cache,
    store_activations,
)
from infcl_jax.planner.state import TeacherMemory
from infcl_jax.planner.times import StepTime, on_devices, scaling, step_time
from infcl_jax.training.compiled_step import OutOfMemory, compiled_bytes, device_memory_limit
from infcl_jax.training.utilization import peak_flops

__all__ = [
    "DEVICES",
    "SAFE_SHARE",
    "Device",
    "MemoryPlan",
    "OutOfMemory",
    "Rates",
    "StepTime",
    "TeacherMemory",
    "Workload",
    "compiled_bytes",
    "describe_plan",
    "device_memory_limit",
    "device_named",
    "explain_out_of_memory",
    "fitting_plan",
    "format_plan",
    "format_scaling",
    "format_time",
    "largest_batch",
    "largest_chunk_size",
    "largest_keep",
    "loss_time",
    "loss_workspace",
    "on_devices",
    "peak_flops",
    "plan_components",
    "plan_memory",
    "rates_of",
    "recommended_cache",
    "scaling",
    "step_time",
    "store_activations",
    "tree_bytes",
    "utilization",
]
