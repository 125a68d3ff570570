import json

import captioned
import pytest

from infcl_jax.data import load_source
from infcl_jax.evaluation.benchmark_source import load_benchmark

ANNOTATIONS = {
    "COCO's captions": {
        "images": [{"id": 1, "file_name": "0.jpg"}],
        "annotations": [{"id": 2, "image_id": 1, "caption": "a"}],
    },
    "COCO's annotations without captions": {"images": [], "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1]}]},
    "captions as BLIP writes them": [{"image": "0.jpg", "caption": ["a", "b"]}],
    "Karpathy's captions, which only evaluations read": {
        "images": [{"filename": "0.jpg", "sentences": [{"raw": "a"}]}]
    },
}


@pytest.mark.parametrize("dataset", ["captions_val2014.json?folder=images", "coco"])
@pytest.mark.parametrize("kind", ANNOTATIONS)
def test_annotations_of_other_tools_are_named(tmp_path, kind, dataset):
    captioned.write_folder(tmp_path / "coco" / "train2014", [("0", {"jpg": captioned.jpeg(0)})])
    (tmp_path / "coco" / "annotations").mkdir()
    for name in ("captions_val2014.json", "coco/annotations/captions_train2014.json"):
        (tmp_path / name).write_text(json.dumps(ANNOTATIONS[kind]))
    match = rf"expected a dataset, got .*captions_\w+\.json, which has {kind}.*; write a metadata\.jsonl"
    with pytest.raises(ValueError, match=match):
        load_source(f"{tmp_path}/{dataset}", "train")
    if not kind.startswith("Karpathy"):
        with pytest.raises(ValueError, match=match):
            load_benchmark(f"{tmp_path}/{dataset}", "train", "data")


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b'[{"path": "a"}]', b"\xff"])
def test_other_json_files_do_not_matter_to_a_folder_of_classes(tmp_path, content):
    captioned.write_folder(tmp_path / "robin", [("0", {"jpg": captioned.jpeg(0)})])
    (tmp_path / "dataset_info.json").write_bytes(content)
    assert load_source(str(tmp_path), "train").classes().names == ("robin",)


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_dict.json", "data-00000-of-00001.arrow"])
def test_folders_of_save_to_disk_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(
        ValueError, match=r"got Arrow files of Hugging Face datasets; write parquet with load_from_disk"
    ):
        load_source(str(tmp_path), "train")
