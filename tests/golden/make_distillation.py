"""Write distillation.npz: OpenCLIP's `DistillClipLoss` and its gradients, on one process in fp64.

    pip install torch open_clip_torch numpy
    python tests/golden/make_distillation.py

Written with open_clip_torch 3.3.0 and torch 2.14.1. The second of its two losses is the mean cross entropy of both
directions. `entropy` is the mean entropy of the teacher's softmaxes over both directions, in NumPy.
"""

from pathlib import Path

import numpy as np
import torch
from open_clip.loss import DistillClipLoss

ROWS, WIDTH, TEACHER_WIDTH, SCALE, TEACHER_SCALE = 12, 8, 10, 14.3, 30.0

rng = np.random.default_rng(0)
text = rng.normal(size=(ROWS, WIDTH))
image = text + rng.normal(size=text.shape)
teacher_text = rng.normal(size=(ROWS, TEACHER_WIDTH))
teacher_image = teacher_text + rng.normal(size=teacher_text.shape)
arrays = {"image": image, "text": text, "teacher_image": teacher_image, "teacher_text": teacher_text}
arrays = {name: a / np.linalg.norm(a, axis=1, keepdims=True) for name, a in arrays.items()}

tensors = {name: torch.tensor(a) for name, a in arrays.items()}
student = [tensors["image"].requires_grad_(), tensors["text"].requires_grad_()]
scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
teacher = tensors["teacher_image"], tensors["teacher_text"], torch.tensor(TEACHER_SCALE, dtype=torch.float64)
contrastive, distillation = DistillClipLoss()(student[0], student[1], scale, *teacher)
distillation.backward()

logits = TEACHER_SCALE * arrays["teacher_image"] @ arrays["teacher_text"].T
entropy = 0.0
for axis in (0, 1):
    p = np.exp(logits - logits.max(axis, keepdims=True))
    p = p / p.sum(axis, keepdims=True)
    entropy -= (p * np.log(p)).sum() / ROWS / 2
np.savez_compressed(
    Path(__file__).with_name("distillation.npz"),
    **arrays,
    scale=SCALE,
    teacher_scale=TEACHER_SCALE,
    contrastive=contrastive.item(),
    distillation=distillation.item(),
    entropy=entropy,
    d_image=student[0].grad.numpy(),
    d_text=student[1].grad.numpy(),
    d_scale=scale.grad.item(),
)
