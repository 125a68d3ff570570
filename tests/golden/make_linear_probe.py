"""Write linear_probe.npz: features, labels and fits of scikit-learn's `LogisticRegression`.

    pip install scikit-learn numpy
    python tests/golden/make_linear_probe.py

Written with scikit-learn 1.9.1 and numpy 2.4.6. It runs in fp64 with a tolerance far below the default, so the fits
are the optima.
"""

from pathlib import Path

import numpy as np
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
np.savez_compressed(Path(__file__).with_name("linear_probe.npz"), **arrays)
