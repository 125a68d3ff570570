"""Write torch_checkpoint.pt and torch_checkpoint.npz: a checkpoint of `torch.save`, and its tensors.

    pip install torch numpy
    python tests/golden/make_torch_checkpoint.py

Written with torch 2.13.0. The checkpoint is that of a training script: nested, with names of a data-parallel module,
views, shared storages and several dtypes. torch_checkpoint_code.pt holds an object of a class.
"""

import collections
import fractions
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
table = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
tensors = collections.OrderedDict(
    {
        "module.table": torch.nn.Parameter(table),
        "module.view": table.t()[1:3],
        "module.half": table.half(),
        "module.bfloat16": table.bfloat16()[::2],
        "module.count": torch.tensor(3),
        "module.empty": torch.zeros(0, 2),
    }
)
torch.save({"epoch": 3, "name": "run", "state_dict": tensors}, HERE / "torch_checkpoint.pt")
torch.save({"table": table, "object": fractions.Fraction(1, 3)}, HERE / "torch_checkpoint_code.pt")
floats = {name.removeprefix("module."): tensor.detach() for name, tensor in tensors.items()}
np.savez_compressed(
    HERE / "torch_checkpoint.npz",
    **{name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in floats.items()},
)
