"""Linear classifiers, and multinomial logistic regression by L-BFGS on a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from scipy import optimize

from infcl_jax.inference.features import shard_rows

MAX_ITERATIONS = 1000  # CLIP, arXiv:2103.00020, appendix A.3
TOLERANCE = 1e-4  # default of scikit-learn's LogisticRegression

# Maximum rows of a tile of logits on each device: 4096 rows of 1000 classes in float32 are 16 MiB.
_CHUNK_ROWS = 4096
PADDING = -1


@dataclasses.dataclass(frozen=True, eq=False)
class LinearClassifier:
    """Linear classifier of features."""

    weights: np.ndarray  # float32 [D, K]
    bias: np.ndarray  # float32 [K]
    classes: np.ndarray  # int64 [K], labels of the training set, ascending
    regularization: float  # L2 strength lambda, or weight decay of AdamW

    def ranks(self, features: np.ndarray, labels: np.ndarray, mesh: Mesh) -> np.ndarray:
        """Return the rank of the true class of each sample, int64 [n].

        It is the number of other classes with at least the logit of the true class, so 0 is a correct prediction. A
        label that the training set lacks has the rank 2^31 - 1.
        """
        index = np.searchsorted(self.classes, labels).clip(max=len(self.classes) - 1)
        known = self.classes[index] == labels
        rows = _shard(features, np.where(known, index, PADDING), mesh)
        ranks = np.asarray(_ranks({"weights": self.weights, "bias": self.bias}, *rows, mesh=mesh))[: len(labels)]
        return np.where(known, ranks, np.iinfo(np.int32).max).astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class LogisticRegression(LinearClassifier):
    """Fitted multinomial logistic regression."""

    loss: float  # regularized training loss, summed over the samples, in nats
    iterations: int  # of L-BFGS
    converged: bool  # whether L-BFGS stopped before its maximum number of iterations


class LogisticRegressionSolver:
    """Fit logistic regressions to one training set.

    The loss is scikit-learn's `LogisticRegression` with C = 1 / regularization: the sum of the cross-entropies
    plus half the regularization times the squared norm of the weights. The bias is not regularized. For two classes,
    the penalty is that of the difference of their weights, as in binary logistic regression.

    The iterations are SciPy's L-BFGS-B on the host, as in scikit-learn. Devices compute loss and gradient in float32
    without TF32, over tiles of logits. Features stay on the devices.
    """

    def __init__(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        mesh: Mesh,
        *,
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
    ):
        """Shard the training set, the same on every process, over the axis "data" of a mesh.

        L-BFGS stops when no entry of the gradient of the mean loss is larger than the tolerance.

        Raises:
          ValueError: there are fewer than two classes, or `max_iterations` < 1.
        """
        if max_iterations < 1:
            raise ValueError(f"expected max_iterations >= 1, got {max_iterations}")
        self._classes, index = np.unique(np.asarray(labels, np.int64), return_inverse=True)
        if len(self._classes) < 2:
            raise ValueError(f"expected training samples of two or more classes, got {len(self._classes)} class")
        self._rows = _shard(features, index, mesh)
        self._samples, self._width, self._mesh = len(labels), features.shape[1], mesh
        self._options = {"maxiter": max_iterations, "gtol": tolerance, "ftol": 64 * np.finfo(float).eps, "maxls": 50}

    def fit(self, regularization: float) -> LogisticRegression:
        """Fit one logistic regression, the same on every process."""
        classes = len(self._classes)
        strength = regularization * (2 if classes == 2 else 1)

        def mean_loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            table = flat.reshape(self._width + 1, classes)
            params = _split(table.astype(np.float32))
            losses, gradient = jax.device_get(_loss_and_gradient(params, *self._rows, mesh=self._mesh))
            penalty = np.concatenate([table[:-1], np.zeros((1, classes))])
            # The host sums in float64, so that the line search sees decreases below float32 resolution.
            loss = np.asarray(losses, np.float64).sum() + strength / 2 * np.sum(penalty**2)
            data = np.concatenate([gradient["weights"], gradient["bias"][None]])
            return loss / self._samples, (data + strength * penalty).ravel() / self._samples

        start = np.zeros((self._width + 1) * classes)
        result = optimize.minimize(mean_loss, start, jac=True, method="L-BFGS-B", options=self._options)
        params = _split(result.x.reshape(-1, classes).astype(np.float32))
        loss, iterations = float(result.fun) * self._samples, int(result.nit)
        converged = iterations < self._options["maxiter"]
        return LogisticRegression(
            params["weights"], params["bias"], self._classes, regularization, loss, iterations, converged
        )


def _split(table: np.ndarray) -> dict[str, np.ndarray]:
    """Split [D + 1, K] into weights and bias."""
    return {"weights": table[:-1], "bias": table[-1]}


def _shard(features: np.ndarray, index: np.ndarray, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Pad samples to equal tiles on each device and shard them."""
    chunks = -(-len(features) // (mesh.size * _CHUNK_ROWS))
    x = shard_rows(mesh, np.asarray(features, np.float32), multiple=chunks)
    return x, shard_rows(mesh, np.asarray(index, np.int32), fill=PADDING, multiple=chunks)


def _tiles(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split the rows of one device into tiles."""
    chunks = -(-len(x) // _CHUNK_ROWS)
    return x.reshape(chunks, -1, x.shape[1]), index.reshape(chunks, -1)


def _logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.dot(x, params["weights"], precision=jax.lax.Precision.HIGHEST) + params["bias"][None]


def cross_entropy(params: dict[str, jax.Array], x: jax.Array, index: jax.Array) -> jax.Array:
    """Sum the cross-entropies of samples with classes in [0, K), or `PADDING` for rows that do not count."""
    log_probabilities = jax.nn.log_softmax(_logits(params, x))
    losses = -jnp.take_along_axis(log_probabilities, jnp.maximum(index, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(index == PADDING, 0.0, losses))


@functools.partial(jax.jit, static_argnames="mesh")
def _loss_and_gradient(params: Any, x: jax.Array, index: jax.Array, *, mesh: Mesh) -> tuple[jax.Array, Any]:
    """Return the loss of each tile, summed over devices, and the gradient."""

    def local(params: Any, x: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
        def accumulate(gradient: Any, tile: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            loss, tile_gradient = jax.value_and_grad(cross_entropy)(varying, *tile)
            return jax.tree.map(jnp.add, gradient, tile_gradient), loss

        # Gradients of replicated parameters would be reduced over the devices once a tile.
        varying = jax.lax.pcast(params, "data", to="varying")
        gradient, losses = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, varying), _tiles(x, index))
        return jax.lax.psum((losses, gradient), "data")

    specs = P(), P("data"), P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(params, x, index)


@functools.partial(jax.jit, static_argnames="mesh")
def _ranks(params: Any, x: jax.Array, index: jax.Array, *, mesh: Mesh) -> jax.Array:
    """Count the rivals of the true class of each sample, replicated on all devices."""

    def tile_ranks(params: Any, x: jax.Array, index: jax.Array) -> jax.Array:
        logits = _logits(params, x)
        own = jnp.take_along_axis(logits, jnp.maximum(index, 0)[:, None], axis=1)
        # NaN ties with everything, so a diverged classifier scores 0.
        return jnp.sum(~(logits < own), axis=1, dtype=jnp.int32) - 1

    def local(params: Any, x: jax.Array, index: jax.Array) -> jax.Array:
        ranks = jax.lax.map(lambda tile: tile_ranks(params, *tile), _tiles(x, index))
        return jax.lax.all_gather(ranks.reshape(-1), "data", tiled=True)

    specs = P(), P("data"), P("data")
    # The type of `all_gather` is varying, although its result is the same on all devices.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(params, x, index)
