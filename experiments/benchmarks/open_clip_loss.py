"""Benchmark of OpenCLIP's losses on one device, for comparison with `experiments.benchmarks.loss`.

    python -m experiments.benchmarks.open_clip_loss --loss=siglip --batch=8192,16384 --features=512,768

Times forward and backward on random normalized bf16 features in device memory. Prints a JSON object for each case, with
status "out of memory" if the pair matrix does not fit. Needs `pip install open_clip_torch absl-py`, not JAX.
"""

import functools
import importlib
import itertools
import json
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments import command_line
from experiments.benchmarks.open_clip import OUT_OF_MEMORY, import_packages, seconds

# The class of each; that of distillation also computes the contrastive loss.
LOSSES = {"clip": "ClipLoss", "siglip": "SigLipLoss", "distillation": "DistillClipLoss"}


class LossCall:
    """Forward and backward pass of a loss; each call is one."""

    def __init__(self, name: str, batch: int, features: int, scale: float, bias: float) -> None:
        """Draw the features."""
        self._torch, _ = import_packages()
        torch = self._torch
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def draw() -> Any:
            rows = torch.randn(batch, features, device=self.device)
            return torch.nn.functional.normalize(rows, dim=-1).to(torch.bfloat16)

        self._inputs = {
            "image_features": draw().requires_grad_(),
            "text_features": draw().requires_grad_(),
            "logit_scale": torch.tensor(scale, device=self.device, requires_grad=True),
        }
        if name == "siglip":
            self._inputs["logit_bias"] = torch.tensor(bias, device=self.device, requires_grad=True)
        elif name == "distillation":
            self._inputs |= {"dist_image_features": draw(), "dist_text_features": draw()}
            self._inputs["dist_logit_scale"] = torch.tensor(scale, device=self.device)
        losses = importlib.import_module("open_clip.loss")  # the package itself does not export all of them
        self._loss: Callable[..., Any] = getattr(losses, LOSSES[name])()

    def __call__(self) -> Any:
        """Compute the loss and all gradients, and return the loss."""
        for value in self._inputs.values():
            value.grad = None
        results = self._loss(**self._inputs)
        loss: Any = sum(results) if isinstance(results, tuple) else results
        loss.backward()
        return loss

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()


def measure(name: str, batch: int, features: int, scale: float, bias: float, repeats: int) -> dict[str, Any]:
    """Measure one case; for the arguments see `LossCall`.

    Returns:
      The record. If memory runs out, its status is "out of memory" and its figures are None.
    """
    torch, _ = import_packages()
    record: dict[str, Any] = {"loss": name, "batch": batch, "features": features, "total_ms": None, "peak_mib": None}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        call = LossCall(name, batch, features, scale, bias)
        record["total_ms"] = 1e3 * seconds(call, repeats)
    except torch.OutOfMemoryError:
        return record | {"status": OUT_OF_MEMORY}
    if torch.cuda.is_available():
        record["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return record | {"status": "ok"}


def benchmark_from_flags(values: flags.FlagValues) -> None:
    """Run the benchmark with the settings of the flags."""
    sizes = command_line.integers("batch", values.batch), command_line.integers("features", values.features)
    for batch, features in itertools.product(*sizes):
        record = measure(values.loss, batch, features, values.scale, values.bias, values.repeats)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":  # not at import: other commands define flags of the same names
    flags.DEFINE_enum("loss", "clip", list(LOSSES), "Loss.")
    flags.DEFINE_list("batch", "8192,16384", "Pairs of the loss.")
    flags.DEFINE_list("features", "512", "Feature dimensions.")
    flags.DEFINE_float("scale", 100.0, "Logit scale.")
    flags.DEFINE_float("bias", -10.0, "Logit bias of the sigmoid loss.")
    flags.DEFINE_integer("repeats", 5, "Timed runs; the median is reported.", lower_bound=1)
    command_line.run(functools.partial(benchmark_from_flags, flags.FLAGS))
