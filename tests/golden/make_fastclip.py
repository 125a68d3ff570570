"""Write fastclip.npz: per-sample temperatures after every step of FastCLIP's code.

It runs on one process in fp64.

    pip install torch numpy
    python tests/golden/make_fastclip.py PATH_TO_FAST_CLIP/src/fast_clip/loss.py

Written from Optimization-AI/fast_clip, commit efd89d51dd43, with torch 2.15.0. `FastCLIPLossIndividual` gets what its
`create_loss` passes: the run's beta1, beta2 and eps, here those of ViTs. Its u is relative to exp(bound), which is
undone here.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

SAMPLES, BATCH, WIDTH, STEPS, EPOCHS = 24, 8, 12, 3, 4

torch.set_default_dtype(torch.float64)
spec = importlib.util.spec_from_file_location("fast_clip_loss", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
loss = module.FastCLIPLossIndividual(
    data_size=SAMPLES,
    tau_init=0.07,
    lr_tau=5e-3,
    beta1_tau=0.9,
    beta2_tau=0.98,
    eps_tau=1e-6,
    gamma=0.2,
    gamma_schedule="cosine",
    gamma_decay_epochs=3,
    rho=5.0,
    eps=1e-14,
    multiply_tau=False,
    device=torch.device("cpu"),
)
rng = np.random.default_rng(0)
# Texts that resemble their images, so that gradients of temperatures stay inside +-5, where they are clipped.
image = rng.normal(size=(EPOCHS * STEPS, BATCH, WIDTH))
text = 1.3 * image + rng.normal(size=image.shape)
image, text = ((a / np.linalg.norm(a, axis=-1, keepdims=True)).astype(np.float32) for a in (image, text))
index = np.concatenate([rng.permutation(SAMPLES).reshape(STEPS, BATCH) for _ in range(EPOCHS)])
records = {"temperature": [], "log_u": []}
for step in range(EPOCHS * STEPS):
    if step % STEPS == 0:
        loss.adjust_hyperparams(step // STEPS)
    features = torch.tensor(image[step], dtype=torch.float64), torch.tensor(text[step], dtype=torch.float64)
    indices = (torch.tensor(index[step]),) * 2
    *_, new = loss.local(features, indices, features, offset=0)
    loss.set_params(*indices, *new)
    records["temperature"].append(torch.cat([loss.tau_im, loss.tau_tt], dim=1).numpy())
    u, bound = (torch.cat(pair, dim=1) for pair in ((loss.u_im, loss.u_tt), (loss.bound_im, loss.bound_tt)))
    records["log_u"].append((torch.log(u) + bound).numpy())
np.savez_compressed(
    Path(__file__).with_name("fastclip.npz"),
    image=image,
    text=text,
    index=index,
    **{name: np.stack(values) for name, values in records.items()},
)
