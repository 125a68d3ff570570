"""Memory planning for training steps, from shapes alone.

Plans list memory by category. Searches find the largest batch and the best chunk size.
"""

from infcl_jax.planner.activations import tree_bytes
from infcl_jax.planner.api import MemoryPlan, Workload, compare_with_compiled, compiled_bytes, plan_memory
from infcl_jax.planner.devices import DEVICES, Device, device_named, memory_at_hand
from infcl_jax.planner.loss import compiled_workspace, loss_workspace
from infcl_jax.planner.report import OutOfMemory, explain_out_of_memory, format_plan
from infcl_jax.planner.search import best_chunk_size, keep_most, largest_batch, most_kept

__all__ = [
    "DEVICES",
    "Device",
    "MemoryPlan",
    "OutOfMemory",
    "Workload",
    "best_chunk_size",
    "compare_with_compiled",
    "compiled_bytes",
    "compiled_workspace",
    "device_named",
    "explain_out_of_memory",
    "format_plan",
    "keep_most",
    "largest_batch",
    "loss_workspace",
    "memory_at_hand",
    "most_kept",
    "plan_memory",
    "tree_bytes",
]
