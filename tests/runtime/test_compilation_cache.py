"""The compilation cache: on by default, complete entries only, one folder per host type."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import oracle
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from infcl_jax.run.build import start_devices
from infcl_jax.runtime import compilation_cache
from infcl_jax.runtime.file_io import user_cache
from infcl_jax.training import create_state

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture
def settings():
    """Restore JAX's cache settings afterwards; cache programs that compile fast, too."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def user(settings, monkeypatch, tmp_path):
    """The cache folder of a user who has not told JAX another one."""
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache_hits(settings):
    """Compiled programs found."""
    hits = []

    def listen(event, **_):
        if event.endswith("/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    yield hits
    jax.monitoring.unregister_event_listener(listen)


@pytest.mark.parametrize(
    ("setting", "folder"), [("", "~/.cache/infcl_jax"), ("relative", "~/.cache/infcl_jax"), ("/a", "/a/infcl_jax")]
)
def test_only_an_absolute_xdg_folder_counts(setting, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", setting)
    assert user_cache() == Path(folder)


def compile_one():
    jax.jit(lambda x: jnp.sin(x) + 1)(jnp.float32(1))  # another function each time, but the same program


@pytest.mark.parametrize("given", [True, False])
def test_compiled_programs_are_kept_for_the_next_start(given, user, cache_hits):
    setting = str(user / "new" / "folder") if given else None
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)  # JAX's default, which the run lowers
    for expected in (0, 1):
        jax.config.update("jax_compilation_cache_dir", None)
        start_devices(runs.config(compilation_cache=setting))
        compile_one()
        assert len(cache_hits) == expected
    folder = user / ("new/folder" if given else "infcl_jax/compiled") / compilation_cache.host_key()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert {path.name[-6:] for path in folder.iterdir()} == {"-cache"}


@pytest.mark.parametrize("setting", ["off", ""])
def test_off_is_no_cache_whatever_jax_was_told(setting, settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    start_devices(runs.config(compilation_cache=setting))
    compile_one()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_environment_comes_before_the_user_s(user):
    jax.config.update("jax_compilation_cache_dir", str(user / "environment"))
    start_devices(runs.config())
    compile_one()
    assert [path.name for path in user.iterdir()] == ["environment"]


def test_a_disabled_cache_stays_so(user):
    jax.config.update("jax_enable_compilation_cache", False)
    start_devices(runs.config())
    assert list(user.iterdir()) == []


def test_several_processes_have_a_cache_only_where_told(user, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compilation_cache.enable(None, print)
    assert jax.config.jax_compilation_cache_dir is None and list(user.iterdir()) == []
    compilation_cache.enable(str(user), print)
    assert "-2p-" in jax.config.jax_compilation_cache_dir


def test_a_user_s_folder_that_cannot_be_used_is_said_and_no_more(user, monkeypatch, capsys):
    (user / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(user / "file"))
    start_devices(runs.config())
    (line,) = capsys.readouterr().out.splitlines()
    assert str(user / "file") in line and "compilation_cache" in line and "Errno" not in line
    assert jax.config.jax_compilation_cache_dir is None


def test_hosts_that_cannot_share_programs_have_different_folders(monkeypatch, tmp_path):
    keys = [compilation_cache.host_key()]
    monkeypatch.setattr(compilation_cache.jaxlib, "__version__", "0.0.1")
    keys.append(compilation_cache.host_key())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    keys.append(compilation_cache.host_key())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    keys.append(compilation_cache.host_key())
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "cpuinfo")
    for flags, clock in (("avx", 1), ("avx avx512f", 1), ("avx avx512f", 2)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : x\ncpu MHz : {clock}\nflags : {flags}\n\n")
        keys.append(compilation_cache.host_key())
    assert keys[-1] == keys[-2] and len(set(keys)) == len(keys) - 1


class Interrupted(Exception):
    """In the middle of a write."""


@pytest.mark.parametrize("former", [None, b"former entry"])
def test_a_reader_never_sees_a_part_of_an_entry(former, monkeypatch, tmp_path):
    """JAX's own cache fails this: it writes to the entry itself."""
    cache = compilation_cache.file_cache()(str(tmp_path), max_size=-1)
    if former is not None:
        cache.put("key", former)
    seen, path_class = [], type(cache.path)
    write_bytes = path_class.write_bytes

    def write_half(path, data):
        write_bytes(path, data[: len(data) // 2])
        seen.append(compilation_cache.file_cache()(str(tmp_path), max_size=-1).get("key"))
        raise Interrupted

    monkeypatch.setattr(path_class, "write_bytes", write_half)
    with pytest.raises(Interrupted):
        cache.put("key", b"entry")
    monkeypatch.undo()
    assert [*seen, cache.get("key")] == [former, former]
    assert len(list(tmp_path.iterdir())) == (former is not None)
    cache.put("key", b"entry")
    assert cache.get("key") == b"entry"


def test_an_entry_that_cannot_be_read_is_replaced(user, cache_hits, recwarn):
    for broken in (True, False):
        start_devices(runs.config(compilation_cache=str(user)))
        if broken:
            compile_one()
            (entry,) = user.glob("*/*-cache")
            entry.write_bytes(entry.read_bytes()[:-100])
            with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
                compile_one()
    compile_one()
    assert len(cache_hits) == 1


@pytest.mark.parametrize("setting", [None, "folder"])
def test_without_atomic_writes_there_is_no_cache(setting, user, monkeypatch):
    """As with a version of JAX that lacks the private name."""
    monkeypatch.setattr(compilation_cache, "file_cache", lambda: getattr(jax_cache, "no_such_name"))  # noqa: B009
    lines = []
    compilation_cache.enable(setting and str(user / setting), lines.append)
    (line,) = lines
    assert jax.__version__ in line and "not be atomic" in line and "\n" not in line
    assert jax.config.jax_compilation_cache_dir is None and list(user.iterdir()) == []


def test_programs_of_the_initialization_hold_no_arrays(user):
    """Counters of random bits as constants would make an entry as large as its parameter."""
    compilation_cache.enable(None, print)
    model = runs.model(**{"text.vocab_size": 2**18})  # 16 MiB of embeddings
    create_state(model, optax.sgd(1e-3), runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(1))
    sizes = [file.stat().st_size for file in user.rglob("*") if file.is_file()]
    assert sizes and max(sizes) < 2**18
