from experiments.benchmarks.tar_index import write_shard
from infcl_jax.data import load_source


def test_synthetic_shards_are_tar_files(tmp_path):
    write_shard(tmp_path / "a.tar", 7, 1000)
    source = load_source(str(tmp_path / "a.tar"), "train")
    assert len(source) == 7 and source.dropped == {} and source._index.problems == ()
    assert (source[6]["image"], source[6]["caption"]) == (bytes(1000), "a caption")
