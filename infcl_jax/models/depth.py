"""Depth of the parameters of a tower."""

import re
from collections.abc import Iterable

# Names below the tower: everything before the first layer; transformer blocks and ResNet bottlenecks; the LayerNorm
# after the last layer.
_STEM = re.compile(r"(conv\d|bn\d|ln_(pre|embed)|(class|token|token_type|positional)_embedding)(/|$)")
_BLOCK = re.compile(r"transformer/block_(\d+)/")
_BOTTLENECK = re.compile(r"layer(\d+)_(\d+)/")
_FINAL_NORM = re.compile(r"ln_(post|final)/")


def distances_to_output(names: Iterable[str], *, stages: bool = False) -> dict[str, int]:
    """Return the distance of each parameter of a tower to the output, in layers.

    Names are those below the tower, such as "proj/kernel". Layers are the blocks of a transformer and the bottlenecks
    of a ResNet, or its stages with `stages`. The distances in a tower with L layers are:

    - 0: pool and projection.
    - 1 to L: layers, from the last to the first. The final LayerNorm has the distance 1 of the last layer.
    - L + 1: embeddings with their LayerNorm, and the stem of a ResNet.

    The distances of other parameters do not change if the stem or lower layers are left out.
    """
    names = list(names)
    layers = {name: layer for name in names if (layer := _layer(name, stages))}
    from_last = sorted(set(layers.values()), reverse=True)
    distances = {layer: distance for distance, layer in enumerate(from_last, start=1)}

    def distance(name: str) -> int:
        if name in layers:
            return distances[layers[name]]
        if _STEM.match(name):
            return len(distances) + 1
        return int(bool(distances and _FINAL_NORM.match(name)))

    return {name: distance(name) for name in names}


def _layer(name: str, stages: bool) -> tuple[int, ...]:
    """Return the numbers of a parameter's layer; empty outside the layers."""
    if match := _BLOCK.match(name):
        return (int(match[1]),)
    if match := _BOTTLENECK.match(name):
        return (int(match[1]),) if stages else (int(match[1]), int(match[2]))
    return ()
