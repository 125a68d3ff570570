"""Published formulas of the global contrastive losses, dense, in NumPy fp64.

They use u instead of its logarithm.
"""

import dataclasses

import numpy as np

EPS = 1e-14
LOSSES = {  # temperature, factor c of the terms: (published, reference), whether there is rho
    "sogclr": ("constant", ("tau", "one"), False),
    "isogclr": ("samples", ("tau", "one"), True),
    "fastclip_v0": ("learned", ("one", "one"), False),
    "fastclip_v1": ("constant", ("tau", "one"), False),
    "fastclip_v2": ("samples", ("tau", "one"), True),
    "fastclip_v3": ("learned", ("tau", "tau"), True),
}


@dataclasses.dataclass
class Memory:
    """u, and per-sample temperatures with Adam's moments, `[n, 2]` each.

    u is 0 for unseen samples.
    """

    u: np.ndarray
    tau: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, samples: int, tau: float) -> "Memory":
        zeros = np.zeros((samples, 2))
        return cls(zeros.copy(), zeros + tau, zeros.copy(), zeros.copy())


def step(
    memory, image, text, index, *, variant, mode, gamma, epoch, rho, scale=None, rate=None, adam=(0.9, 0.999, 1e-8)
):
    """Loss and gradients over image, text and scale of one batch; updates `memory`."""
    kind, factors, regularized = LOSSES[variant]
    published = mode == "published"
    kappa, scaled = (1.0 if published else 0.5), factors[0 if published else 1] == "tau"
    rho = rho if regularized else 0.0
    x, y = np.asarray(image, np.float64), np.asarray(text, np.float64)
    b, s = len(x), x @ y.T
    tau = memory.tau[index] if kind == "samples" else np.full((b, 2), 1 / float(scale))
    difference = np.stack([s, s.T]) - np.diagonal(s)[None, :, None]  # [side, i, j]
    exponential = np.exp(difference / tau.T[:, :, None]) * (1 - np.eye(b))
    g = exponential.sum(2).T / (b - 1)
    old = memory.u[index]
    u = np.where(old == 0, g, (1 - gamma) * old + gamma * g)
    c = tau if scaled else np.ones_like(tau)
    loss = kappa * (c * np.log(EPS + u) + rho * tau).sum(1).mean()
    # d g_i / d (s_ij - s_ii) = exponential_ij / (b - 1) / tau_i
    weight = (kappa * c / (EPS + u) / b / (b - 1) / tau).T[:, :, None] * exponential
    d_s = weight[0] + weight[1].T - np.diag(weight.sum((0, 2)))
    pairs = (exponential * difference).sum(2).T / (b - 1) / (EPS + u)  # r (m - s_ii)
    d_scale = 0.0
    if kind == "learned":
        t = 1 / float(scale)
        d_pairs = pairs.sum(1).mean()  # D
        if not scaled:
            d_log_scale = d_pairs / t
        elif published:
            d_log_scale = -t * (np.log(EPS + u).sum(1).mean() + 2 * rho - d_pairs / t)
        else:
            d_log_scale = d_pairs - t * rho - t / 2 * np.log(u).sum(1).mean()
        d_scale = d_log_scale / float(scale)
    if kind == "samples":
        slope = np.clip(np.log(EPS + u) + rho - pairs / tau, -5, 5)
        beta1, beta2 = (0.0, 0.0) if epoch == 0 else adam[:2]
        first = beta1 * memory.first[index] + (1 - beta1) * slope
        second = beta2 * memory.second[index] + (1 - beta2) * slope**2
        corrected = first / (1 - beta1 ** (epoch + 1)), second / (1 - beta2 ** (epoch + 1))
        memory.tau[index] = np.clip(tau - rate * corrected[0] / (np.sqrt(corrected[1]) + adam[2]), 0.01, 1.0)
        memory.first[index], memory.second[index] = first, second
    memory.u[index] = u
    return loss, (d_s @ y, d_s.T @ x, d_scale)
