import numpy as np
import runs

from experiments.benchmarks import tar_index
from infcl_jax.data import load_source
from infcl_jax.data.decode import decode_example


def test_synthetic_shards_are_tar_files(tmp_path):
    tar_index.write_shard(tmp_path / "a.tar", 7, 5000)
    source = load_source(str(tmp_path / "a.tar"), "train")
    assert len(source) == 7 and source.dropped == {} and source._index.problems == ()
    assert len(source[6]["image"]) == 5000 and source[6]["caption"] == "a caption"
    assert decode_example(source, 6)["image"].shape == (224, 224, 3)


def test_a_repeated_scan_gives_the_index_of_all_shards(tmp_path):
    (tmp_path / "00000.tar").write_bytes(b"of the user")
    sizes = (f"--folder={tmp_path}", "--shards=3", "--samples_per_shard=20", "--image_bytes=4096")
    entries = []
    for option in ("--build", "--repeat_scan", "--nobuild"):
        status, output, errors = runs.command("experiments.benchmarks.tar_index", *sizes, option)
        assert (status, errors) == (0, "") and "first batch of 60 after a resume" in output
        entries.append(load_source(f"{tmp_path}/synthetic_tars/{{00000..00002}}.tar", "train")._index.entries)
    assert len(entries[0]) == 60
    assert (tmp_path / "00000.tar").read_bytes() == b"of the user"
    for other in entries[1:]:
        np.testing.assert_array_equal(other, entries[0])


def test_a_folder_is_required():
    status, _, errors = runs.command("experiments.benchmarks.tar_index")
    assert status == 1 and errors == "error: expected --folder, the folder of the tar files, got none\n"
