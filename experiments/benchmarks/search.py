"""Benchmark of nearest-neighbor search: time, memory and a check against brute force, beside torch and FAISS.

    python -m experiments.benchmarks.search --rows=100000 --dim=32 --neighbors=10
    python -m experiments.benchmarks.search --rows=1000000 --dim=512 --checked=100 --recall --peers

Searches the nearest of `--rows` random gallery rows for as many queries, on all devices, with compiled programs.
docs/performance.md defines the figures.
"""

import functools
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments import command_line
from experiments.benchmarks import timing
from infcl_jax import distributed
from infcl_jax.evaluation import retrieval_recall, top_k
from infcl_jax.inference.features import l2_normalize

_ROWS = flags.DEFINE_integer("rows", 100_000, "Number of queries, and of gallery rows.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 32, "Feature dimension D.", lower_bound=1, allow_override=True)
_NEIGHBORS = flags.DEFINE_integer("neighbors", 10, "Neighbors k of each query.", lower_bound=1)
_CHECKED = flags.DEFINE_integer(
    "checked",
    None,
    "Queries compared with brute force in float64, which takes minutes for all, the default.",
    lower_bound=0,
)
_RECALL = flags.DEFINE_bool("recall", False, "Also time the recall of retrieval in both directions.")
_PEERS = flags.DEFINE_bool("peers", False, "Also search with torch and FAISS, where they are installed.")

_BRUTE_ROWS = 64  # queries compared at once; 100,000 float64 similarities of each are 51 MB
_WARM_UP = 4096  # queries of the search that compiles the programs: two blocks
_TORCH_ROWS = 2048  # queries of torch's search at once
_TORCH_COLUMNS = 1 << 17  # gallery rows of a tile of torch's search: 1 GiB of similarities


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


def torch_search(query: np.ndarray, gallery: np.ndarray, k: int) -> np.ndarray:
    """Search with torch in tiles: fp32 GEMM, `topk` of the tile, `topk` of the best of all tiles."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    on_device = torch.from_numpy(l2_normalize(gallery)).to(device)
    results = []
    for start in range(0, len(query), _TORCH_ROWS):
        block, best = torch.from_numpy(l2_normalize(query[start : start + _TORCH_ROWS])).to(device), []
        for first in range(0, len(gallery), _TORCH_COLUMNS):
            tile = on_device[first : first + _TORCH_COLUMNS]
            values, index = torch.topk(block @ tile.T, min(k, len(tile)))
            best.append((values, index + first))
        values, index = (torch.cat(parts, dim=1) for parts in zip(*best, strict=True))
        results.append(torch.gather(index, 1, torch.topk(values, k).indices).cpu())
    return torch.cat(results).numpy()


def faiss_search(query: np.ndarray, gallery: np.ndarray, k: int) -> np.ndarray:
    """Search with FAISS's flat index of inner products, on its GPUs if it has any."""
    import faiss

    index = faiss.IndexFlatIP(gallery.shape[1])
    if getattr(faiss, "get_num_gpus", int)():
        index = faiss.index_cpu_to_all_gpus(index)
    index.add(l2_normalize(gallery))
    return index.search(l2_normalize(query), k)[1]


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def peers(query: np.ndarray, gallery: np.ndarray, index: np.ndarray) -> Iterator[str]:
    """Yield a line for each peer: its time, and in how many queries its neighbors differ from `index`."""
    k = index.shape[1]
    for name, search in {"torch": torch_search, "FAISS": faiss_search}.items():
        try:
            search(query[:_TORCH_ROWS], gallery, k)
        except ImportError:
            yield f"{name} is not installed"
            continue
        seconds, theirs = _seconds(functools.partial(search, query, gallery, k))
        different = np.any(theirs != index, axis=1).sum()
        yield f"{name}: {seconds:.1f} s, other neighbors or another order in {different} queries"


def lines(query: np.ndarray, gallery: np.ndarray, k: int, mesh: Mesh) -> Iterator[str]:
    """Yield the lines of the benchmark."""
    rows, dim = query.shape
    before, _ = peak_mib(), top_k(query[:_WARM_UP], gallery, k, mesh)
    seconds, (_, index) = _seconds(lambda: top_k(query, gallery, k, mesh))
    yield (
        f"{rows} x {rows} rows of {dim}, k = {k}, {mesh.size} devices: {seconds:.1f} s,"
        f" peak memory {peak_mib():.0f} MiB, {before:.0f} MiB before (the matrix: {4 * rows**2 / 2**20:.0f} MiB)"
    )
    gemm, rate = timing.fp32_gemm_tflops(5), timing.tflops(2 * rows**2 * dim, seconds, mesh.size)
    yield f"{rate:.3g} TFLOP/s per device, {rate / gemm:.2f} of an fp32 GEMM's {gemm:.3g}"
    if used := max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.local_devices):
        yield f"peak memory of a device: {used / 2**20:.0f} MiB"
    checked = rows if _CHECKED.value is None else min(rows, _CHECKED.value)
    if checked:
        different = brute_force_differences(query[:checked], gallery, index[:checked])
        yield f"{different} of {checked} queries differ from brute force in float64"
    if _RECALL.value:
        seconds, recall = _seconds(lambda: retrieval_recall(query, gallery, mesh))
        yield f"recall in both directions: {seconds:.1f} s, {recall}"
    if _PEERS.value:
        yield from peers(query, gallery, index)


def main() -> None:
    """Search, and print the time, the memory and the differences."""
    distributed.initialize()
    rng = np.random.default_rng(0)
    query, gallery = (rng.standard_normal((_ROWS.value, _DIM.value), np.float32) for _ in range(2))
    for line in lines(query, gallery, _NEIGHBORS.value, distributed.data_mesh()):
        print(line, flush=True)


if __name__ == "__main__":
    command_line.run(main)
