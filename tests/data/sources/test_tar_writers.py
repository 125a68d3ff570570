import shutil
from pathlib import Path

import pytest

from infcl_jax.data import load_source

TARS = Path(__file__).parents[2] / "golden" / "tars"


@pytest.fixture
def tars(tmp_path):
    """Copy, next to which an index can be written."""
    return shutil.copytree(TARS, tmp_path / "tars")


def test_webdataset(tars, caplog):
    source = load_source(f"{tars}/webdataset-{{000000..000001}}.tar", "train")
    captions = {source.key(i): source[i]["caption"] for i in range(len(source))}
    assert captions == {"plain": "caption 0", "v1.0/folder": "caption 1", "grün/" + "x" * 120: "caption 2"}
    assert source.dropped == {"dotted name": 6}
    (message,) = caplog.messages
    assert "3 samples, dropped: 6 dotted name; the key of dotted.5mm.json ends at the first dot (dotted)" in message
    with pytest.raises(ValueError, match=r"compressed\.tar\.gz, which is compressed with gzip"):
        load_source(f"{tars}/compressed.tar.gz", "train")


@pytest.mark.parametrize(
    "layout,keys", [("webdataset", ["000000", "000011"]), ("files", ["00000/000000.png", "00001/000011.png"])]
)
def test_img2dataset(tars, layout, keys):
    source = load_source(f"{tars}/img2dataset_{layout}", "train")
    assert [(source.key(i), source[i]["caption"]) for i in range(len(source))] == list(
        zip(keys, ["caption 0", "caption 4"], strict=True)
    )
    assert source.dropped == {"no caption": 2}
