"""Write linear_probe.npz: features, labels and classifiers of scikit-learn and of PyTorch's AdamW.

    pip install scikit-learn torch numpy
    python tests/golden/make_linear_probe.py

Written with scikit-learn 1.9.1, torch 2.13.0 and numpy 2.4.6. scikit-learn's `LogisticRegression` runs in fp64 with a
tolerance far below the default, so the fits are the optima. AdamW follows clip_benchmark 1.6.2: `torch.nn.Linear`,
cosine decay of the learning rate from 0.1 without warmup, batches of 64 with a smaller last one.
"""

from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

CASES = {"binary": 2, "multinomial": 5}
REGULARIZATION = (0.1, 1.0, 100.0)

arrays = {}
for name, classes in CASES.items():
    rng = np.random.default_rng(classes)
    centers = rng.normal(size=(classes, 12))
    labels = rng.integers(0, classes, 240)
    features = (centers[labels] + 1.5 * rng.normal(size=(240, 12))).astype(np.float32)
    train, test = slice(0, 150), slice(150, None)
    arrays |= {f"{name}/features": features, f"{name}/labels": labels}
    for strength in REGULARIZATION:
        model = LogisticRegression(C=1 / strength, tol=1e-10, max_iter=100_000)
        x, y = features.astype(np.float64), labels
        model.fit(x[train], y[train])
        log_probabilities = model.predict_log_proba(x[train])
        loss = -log_probabilities[np.arange(150), y[train]].sum() + strength / 2 * np.sum(model.coef_**2)
        arrays |= {
            f"{name}/{strength}/loss": loss,
            f"{name}/{strength}/coef": model.coef_,
            f"{name}/{strength}/intercept": model.intercept_,
            f"{name}/{strength}/accuracy": model.score(x[test], y[test]),
        }

rng = np.random.default_rng(0)
EPOCHS, BATCH, WEIGHT_DECAY = 3, 64, 0.3
x, y = (torch.tensor(arrays[f"multinomial/{name}"][:150]) for name in ("features", "labels"))
linear = torch.nn.Linear(12, 5)
start = {name: value.detach().numpy().copy() for name, value in linear.named_parameters()}
optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, weight_decay=WEIGHT_DECAY)
orders = np.stack([rng.permutation(150) for _ in range(EPOCHS)])
batches = [order[i : i + BATCH] for order in orders for i in range(0, 150, BATCH)]
for step, batch in enumerate(batches):
    optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * step / len(batches)))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(linear(x[batch]), y[batch]).backward()
    optimizer.step()
arrays |= {f"adamw/start/{name}": value for name, value in start.items()}
arrays |= {f"adamw/after/{name}": value.detach().numpy() for name, value in linear.named_parameters()}
arrays |= {"adamw/orders": orders.astype(np.int32), "adamw/weight_decay": WEIGHT_DECAY}
np.savez_compressed(Path(__file__).with_name("linear_probe.npz"), **arrays)
