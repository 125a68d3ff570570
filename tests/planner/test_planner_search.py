"""The planner's searches: what they find fits, and one step more does not."""

import dataclasses
import math

import pytest
import runs

from infcl_jax.models import create_model
from infcl_jax.planner import (
    largest_batch,
    largest_chunk_size,
    largest_keep,
    plan_memory,
    recommended_cache,
    store_activations,
)
from infcl_jax.training import NO_CACHE

MIB = 1 << 20
SEARCHES = [{}, {"devices": 4}, {"devices": 2, "chunk_size": 48}, {"chunk_size": 64, "offload": "host"}]


@pytest.mark.parametrize(("settings", "memory"), list(zip(SEARCHES, [24 * MIB, 150 * MIB] * 2, strict=True)))
def test_the_largest_batch_fits_and_one_step_more_does_not(settings, memory):
    run = runs.workload(**(settings | {"batch_size": settings.get("chunk_size", settings.get("devices", 1))}))
    found, step = largest_batch(run, memory), run.cache.chunk_size or run.devices
    assert found % step == 0 and found > step
    assert plan_memory(dataclasses.replace(run, batch_size=found), memory).fits
    assert not plan_memory(dataclasses.replace(run, batch_size=found + step), memory).fits


@pytest.mark.parametrize("settings", [{}, {"devices": 4}, {"offload": "replay", "chunk_size": 1, "keep": 1}])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_largest_chunk_size_fits_and_twice_that_does_not(settings, share):
    """In a share of the memory that one chunk of all rows would need."""
    run = runs.workload(**(settings | {"batch_size": 4096}))
    memory = int(share * plan_memory(run.with_cache(chunk_size=4096)).peak)
    found = largest_chunk_size(run, memory)
    assert (found // run.devices).bit_count() == 1 and found < run.batch_size
    assert plan_memory(run.with_cache(chunk_size=found), memory).fits
    assert not plan_memory(run.with_cache(chunk_size=2 * found), memory).fits


@pytest.mark.parametrize(("batch", "devices", "expected"), [(1, 1, 1), (96, 1, 96), (96, 4, 96), (64, 4, 64)])
def test_a_chunk_never_exceeds_the_batch(batch, devices, expected):
    assert largest_chunk_size(runs.workload(batch_size=batch, devices=devices), 1 << 40) == expected


@pytest.mark.parametrize("settings", [{"chunk_size": 24}, {"chunk_size": 48, "devices": 2, "offload": "host"}])
@pytest.mark.parametrize(("share", "expected"), [(0.5, "none"), (1.2, "some"), (1e6, "all")])
def test_the_most_chunks_kept_fit_and_one_more_does_not(settings, share, expected):
    run = runs.workload(**(settings | {"batch_size": 4096}))
    memory, chunks = int(share * plan_memory(run).peak), math.ceil(4096 / run.cache.chunk_size)
    found = largest_keep(run, memory)
    assert {"none": found == 0, "some": 0 < found < chunks, "all": found == chunks}[expected]
    if expected != "none":
        assert plan_memory(run.with_cache(keep=found), memory).fits
    if expected == "some":
        assert not plan_memory(run.with_cache(keep=found + 1), memory).fits


@pytest.mark.parametrize(("beside", "expected"), [(0, "none"), (0.5, "chunks"), (1.5, "streams"), (1e6, "all")])
def test_residual_streams_are_kept_before_chunks_unless_all_fits(beside, expected):
    """With memory beside that of a plan for so many times the residual streams."""
    model = create_model("tiny", **{"vision.layers": 4, "text.layers": 4})
    run = runs.workload(model=model, batch_size=4096, chunk_size=64)
    least, streams = (plan_memory(run.with_cache(keep_residual=kept)).peak for kept in (False, True))
    memory = int(least + beside * (streams - least))
    kept = store_activations(run, memory)
    assert plan_memory(kept, memory).fits and kept.cache.keep_residual == (expected == "streams")
    assert {"none": kept.cache.keep == 0, "all": kept.cache.keep == 64}.get(expected, 0 < kept.cache.keep < 64)
    assert kept.cache.keep == largest_keep(kept, memory)


@pytest.mark.parametrize("settings", [{}, {"devices": 4}, {"chunk_size": 64, "offload": "replay"}])
@pytest.mark.parametrize("share", [0.1, 0.5, 2])
def test_the_recommended_settings_fit_and_recompute_no_more_than_larger_chunks(settings, share):
    """In a share of the memory of the step without caching."""
    run = runs.workload(model=create_model("tiny"), **(settings | {"batch_size": 4096}))
    memory = int(share * plan_memory(dataclasses.replace(run, cache=NO_CACHE)).peak)
    cache = recommended_cache(run, memory)
    found = dataclasses.replace(run, cache=cache)
    assert plan_memory(found, int(0.95 * memory)).fits
    assert (cache == NO_CACHE) == (share == 2)
    if share < 2:
        assert cache.offload == run.cache.offload
        largest = largest_chunk_size(run.with_cache(chunk_size=64, keep=0), int(0.95 * memory))
        stored = store_activations(run.with_cache(chunk_size=largest), int(0.95 * memory))
        assert found.stored_rows >= stored.stored_rows or cache.keep_residual


def test_the_batch_leaves_the_device_only_if_nothing_fits_otherwise():
    run = runs.workload(batch_size=1 << 16)
    chunks, host = (plan_memory(run.with_cache(chunk_size=1, offload=kind)).peak for kind in ("none", "host"))
    assert recommended_cache(run, int(1.5 * chunks)).offload == "none"
    assert recommended_cache(run, (chunks + host) // 2).offload == "host"


def test_chunks_are_kept_of_chunks():
    with pytest.raises(ValueError, match=r"expected a chunk_size, .* got None"):
        largest_keep(runs.workload(), 1 << 40)


@pytest.mark.parametrize("search", [largest_batch, largest_chunk_size])
def test_what_never_fits_is_refused(search):
    with pytest.raises(ValueError, match=r"expected memory for a (batch|chunk) of 1 .*got less"):
        search(runs.workload(), 1000)
