"""Memory and time of training steps, from shapes alone.

A plan lists memory by component. Searches find the largest batch that fits and the gradient caching that recomputes
least. Times come from the measured rates of GPUs.
"""

from infcl_jax.planner.activations import tree_bytes as tree_bytes
from infcl_jax.planner.api import MemoryPlan as MemoryPlan
from infcl_jax.planner.api import Workload as Workload
from infcl_jax.planner.api import plan_memory as plan_memory
from infcl_jax.planner.api import utilization as utilization
from infcl_jax.planner.devices import DEVICES as DEVICES
from infcl_jax.planner.devices import Device as Device
from infcl_jax.planner.devices import Rates as Rates
from infcl_jax.planner.devices import device_named as device_named
from infcl_jax.planner.devices import rates_of as rates_of
from infcl_jax.planner.loss import loss_time as loss_time
from infcl_jax.planner.loss import loss_workspace as loss_workspace
from infcl_jax.planner.report import describe_plan as describe_plan
from infcl_jax.planner.report import explain_out_of_memory as explain_out_of_memory
from infcl_jax.planner.report import format_plan as format_plan
from infcl_jax.planner.report import format_scaling as format_scaling
from infcl_jax.planner.report import format_time as format_time
from infcl_jax.planner.report import plan_components as plan_components
from infcl_jax.planner.search import SAFE_SHARE as SAFE_SHARE
from infcl_jax.planner.search import fitting_plan as fitting_plan
from infcl_jax.planner.search import largest_batch as largest_batch
from infcl_jax.planner.search import largest_chunk_size as largest_chunk_size
from infcl_jax.planner.search import largest_keep as largest_keep
from infcl_jax.planner.search import recommended_cache as recommended_cache
from infcl_jax.planner.search import store_activations as store_activations
from infcl_jax.planner.state import TeacherMemory as TeacherMemory
from infcl_jax.planner.times import StepTime as StepTime
from infcl_jax.planner.times import on_devices as on_devices
from infcl_jax.planner.times import scaling as scaling
from infcl_jax.planner.times import step_time as step_time
from infcl_jax.training.compiled_step import OutOfMemory as OutOfMemory
from infcl_jax.training.compiled_step import compiled_bytes as compiled_bytes
from infcl_jax.training.compiled_step import device_memory_limit as device_memory_limit
from infcl_jax.training.compiled_step import peak_flops as peak_flops
