"""Benchmark of nearest-neighbor search, with a check against brute force.

    python -m experiments.benchmarks.search --rows=100000 --dim=32 --neighbors=10

Searches the nearest of `--rows` random gallery rows for as many queries, on all devices. Reports the seconds, the peak
memory of the process, and the number of queries whose neighbors differ from those of a float64 sort in NumPy.
"""

import resource
import time

import numpy as np
from absl import flags

from experiments import command_line
from infcl_jax import distributed
from infcl_jax.evaluation import top_k
from infcl_jax.evaluation.features import l2_normalize

_ROWS = flags.DEFINE_integer("rows", 100_000, "Number of queries, and of gallery rows.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 32, "Feature dimension D.", lower_bound=1)
_NEIGHBORS = flags.DEFINE_integer("neighbors", 10, "Neighbors k of each query.", lower_bound=1)
_CHECK = flags.DEFINE_bool("check", True, "Compare with brute force, which takes minutes.")

_BRUTE_ROWS = 64  # queries compared at once; 100,000 float64 similarities of each are 51 MB


def brute_force_differences(query: np.ndarray, gallery: np.ndarray, index: np.ndarray) -> int:
    """Count the queries whose neighbors differ from those of a float64 sort."""
    query, gallery = (l2_normalize(x).astype(np.float64) for x in (query, gallery))
    k, different = index.shape[1], 0
    for start in range(0, len(query), _BRUTE_ROWS):
        distance = -(query[start : start + _BRUTE_ROWS] @ gallery.T)
        nearest = np.sort(np.argpartition(distance, k - 1, axis=1)[:, :k], axis=1)
        order = np.argsort(np.take_along_axis(distance, nearest, axis=1), axis=1, kind="stable")
        expected = np.take_along_axis(nearest, order, axis=1)
        different += int(np.any(expected != index[start : start + _BRUTE_ROWS], axis=1).sum())
    return different


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Search, and print the time, the memory and the differences."""
    distributed.initialize()
    mesh, rows = distributed.data_mesh(), _ROWS.value
    rng = np.random.default_rng(0)
    query, gallery = (rng.standard_normal((rows, _DIM.value), np.float32) for _ in range(2))
    before, start = peak_mib(), time.perf_counter()
    _, index = top_k(query, gallery, _NEIGHBORS.value, mesh)
    seconds = time.perf_counter() - start
    print(
        f"{rows} x {rows} rows of {_DIM.value}, k = {_NEIGHBORS.value}, {mesh.size} devices: {seconds:.1f} s,"
        f" peak memory {peak_mib():.0f} MiB, {before:.0f} MiB before (the matrix: {4 * rows**2 / 2**20:.0f} MiB)"
    )
    if _CHECK.value:
        print(f"{brute_force_differences(query, gallery, index)} queries differ from brute force in float64")


if __name__ == "__main__":
    command_line.run(main)
