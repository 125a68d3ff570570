import contextlib
from types import SimpleNamespace

import pytest

from infcl_jax.data import parallelism
from infcl_jax.data.parallelism import (
    CONCATENATE,
    DECODE,
    GPU_DECODE,
    READ,
    STAGES,
    TOKENIZE,
    Parallelism,
    check_shared_memory,
    choose_parallelism,
    limiting_stage,
    seconds_name,
    take_seconds,
    timed,
)

GIB = 2**30
BATCH_32K = 32_768 * 3 * 224**2  # 4.9 GB


def choose(batch_bytes=1, cores=4, memory=64 * GIB, **settings):
    return choose_parallelism(batch_bytes, cores=cores, memory=memory, **settings)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 0), (7, 0), (8, 8), (16, 16)])
def test_each_core_reads(cores, workers):
    chosen = choose(cores=cores)
    assert chosen.num_workers == workers and chosen.readers == chosen.cores == cores


@pytest.mark.parametrize(
    ("batch_bytes", "memory_gib", "processes", "batches"),
    [
        (BATCH_32K, 128, 1, 2),
        (BATCH_32K, 64, 1, 1),
        (BATCH_32K, 560, 4, 2),
        (BATCH_32K, 560, 8, 1),
        (10**6, 1, 1, 2),
    ],
)
def test_prefetched_batches_fit_into_host_memory(batch_bytes, memory_gib, processes, batches):
    chosen = choose(batch_bytes, memory=memory_gib * GIB, processes_per_host=processes)
    assert chosen.prefetch_batches == batches
    share = memory_gib * GIB / 4 / processes
    assert batches == 1 or (batches + 3) * batch_bytes <= share


def test_settings_win_over_the_machine():
    chosen = choose(BATCH_32K, cores=64, memory=GIB, num_workers=3, prefetch_batches=5)
    assert (chosen.num_workers, chosen.prefetch_batches) == (3, 5)
    assert choose(cores=64, num_workers=0).readers == 64  # threads
    assert choose(cores=64, num_threads=5).readers == 5


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (Parallelism(0, 12, 2, 12), "12 reading threads, 2 batches ahead"),
        (Parallelism(1, 12, 1, 12), "1 worker process, 1 batch ahead"),
    ],
)
def test_description(chosen, text):
    assert str(chosen) == text


@pytest.mark.parametrize(
    ("chosen", "stage", "advice"),
    [
        (Parallelism(0, 4, 2, 4), READ, "try num_threads=8"),
        (Parallelism(4, 4, 2, 4), READ, "try num_workers=8"),
        (Parallelism(0, 2, 2, 4), DECODE, "try num_threads=4"),
        (Parallelism(2, 4, 2, 4), DECODE, "try num_workers=4"),
        (Parallelism(0, 4, 2, 4), DECODE, "all 4 cores are in use"),
        (Parallelism(0, 16, 2, 16), DECODE, "try num_workers=16"),
        (Parallelism(0, 4, 2, 4), TOKENIZE, "try num_workers=4"),
        (Parallelism(0, 1, 2, 1), TOKENIZE, "all 1 cores are in use"),
        (Parallelism(4, 4, 2, 4), TOKENIZE, "all 4 cores are in use"),
        (Parallelism(4, 4, 2, 4), CONCATENATE, "more training processes"),
        (Parallelism(4, 4, 2, 4), GPU_DECODE, "decode=pillow"),
    ],
)
def test_advice_names_a_setting_that_is_not_yet_at_its_limit(chosen, stage, advice):
    assert advice in chosen.advice(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_limiting_stage_takes_most_time(stage):
    stats = {seconds_name(other): 3.0 if other == stage else 0.5 for other in STAGES}
    assert limiting_stage(stats, readers=2) == stage


def test_one_thread_concatenates_what_all_readers_read():
    stats = {seconds_name(DECODE): 8.0, seconds_name(CONCATENATE): 3.0}
    assert [limiting_stage(stats, readers) for readers in (1, 2, 3, 4)] == [DECODE, DECODE, CONCATENATE, CONCATENATE]


def test_blocks_of_each_stage_add_up(monkeypatch):
    times = iter([0.0, 1.0, 5.0, 7.0, 10.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    for stage in (READ, DECODE, READ):
        with timed(stage):
            pass
    assert take_seconds() == {"seconds/read": 5.0, "seconds/decode": 2.0}
    assert take_seconds() == {}


@pytest.mark.parametrize(
    ("limits", "cores", "memory"),
    [
        ({}, 4, 8 * GIB),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, 4, 8 * GIB),
        ({"cpu.max": "200000 100000\n", "memory.max": f"{GIB}\n"}, 2, GIB),
        ({"cpu.max": "50000 100000\n", "memory.max": f"{2**62}\n"}, 1, 8 * GIB),
    ],
)
def test_limits_of_a_container_count(monkeypatch, tmp_path, limits, cores, memory):
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(parallelism, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 8 * GIB // 4096)
    assert (parallelism.usable_cores(), parallelism.host_memory()) == (cores, memory)


@pytest.mark.parametrize(
    ("workers", "chunks", "processes", "needed"), [(0, 1, 1, 0), (2, 4, 1, 12), (2, 1, 1, 16), (3, 4, 2, 36)]
)
def test_chunks_of_workers_must_fit_into_shared_memory(monkeypatch, workers, chunks, processes, needed):
    chosen = Parallelism(workers, num_threads=2, prefetch_batches=2, cores=2)
    free = needed * 2**20 // 4096
    for blocks in (free, free - 1):
        status = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=2 * blocks)
        monkeypatch.setattr("os.statvfs", lambda path, status=status: status)
        refused = pytest.raises(ValueError, match=f"^expected {needed} MiB free in /dev/shm.*num_workers=0.*--shm-size")
        with refused if workers and blocks < free else contextlib.nullcontext():
            check_shared_memory(chosen, 2**20, chunks, processes)


@pytest.mark.parametrize(
    ("limits", "free"), [({}, 3), ({"memory.max": f"{5 * GIB}\n", "memory.current": f"{4 * GIB}\n"}, 1)]
)
def test_free_memory_is_that_of_the_container(monkeypatch, tmp_path, limits, free):
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(parallelism, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {3 * 2**20} kB\n")
    monkeypatch.setattr(parallelism, "_MEMINFO", tmp_path / "meminfo")
    assert parallelism.free_host_memory() == free * GIB
