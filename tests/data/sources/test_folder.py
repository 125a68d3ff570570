import json
import pickle

import captioned
import pytest

from infcl_jax.data import BadRecordError, load_source


def captions(source):
    return [source[index]["caption"] for index in range(len(source))]


def test_captions_beside_images(tmp_path, caplog):
    samples = [(f"{'ba'[i % 2]}/{key}", contents) for i, (key, contents) in enumerate(captioned.samples(4))]
    del samples[2][1]["txt"]
    captioned.write_folder(tmp_path, samples)
    (tmp_path / "c.JPEG").write_bytes(captioned.jpeg(9))
    (tmp_path / "c.txt").write_text("c\n")
    (tmp_path / "notes.md").write_text("no image")
    source = load_source(str(tmp_path), "train")
    assert captions(source) == ["caption 1", "caption 3", "caption 0", "c"]
    assert source[3]["image"] == captioned.jpeg(9)
    assert source.dropped == {"no caption": 1} and "4 samples, dropped: 1 no caption" in caplog.text
    assert pickle.loads(pickle.dumps(source))[1] == source[1]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_metadata_in_the_layout_of_image_folder(tmp_path, name):
    for split in ("train", "test"):
        folder = tmp_path / split
        captioned.write_folder(folder, [(key, {"jpg": contents["jpg"]}) for key, contents in captioned.samples(3)])
        rows = [(f"{i:06d}.jpg", f"{split} {i}") for i in (2, 0, 1)]
        if name.endswith("csv"):
            captioned.write_csv(folder / name, rows, ("file_name", "text"))
        else:
            lines = [json.dumps({"file_name": path, "text": caption}) for path, caption in rows]
            (folder / name).write_text("\n".join(lines))
    source = load_source(str(tmp_path), "test")
    assert captions(source) == ["test 2", "test 0", "test 1"]
    assert source[0]["image"] == captioned.jpeg(2)


def test_damaged_samples_name_the_path(tmp_path):
    captioned.write_folder(tmp_path, captioned.samples(2))
    source = load_source(str(tmp_path), "train")
    (tmp_path / "000001.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadRecordError, match=r"bad record 1 of .*, split train \(000001\.jpg\): .*not UTF-8: byte 3"):
        source[1]
    (tmp_path / "000000.jpg").unlink()
    with pytest.raises(BadRecordError, match=r"bad record 0 of .*, split train \(000000\.jpg\): FileNotFoundError"):
        source[0]


@pytest.mark.parametrize("images", [0, 2])
def test_folder_without_captions(tmp_path, images):
    for number in range(images):
        (tmp_path / f"{number}.jpg").write_bytes(captioned.jpeg(number))
    with pytest.raises(ValueError, match=rf"has {images} images and none with a caption; put KEY\.txt beside KEY\.jpg"):
        load_source(str(tmp_path), "train")
    with pytest.raises(ValueError, match=r"expected no options for the folder"):
        load_source(f"{tmp_path}?image=path", "train")
