import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from infcl_jax.data import shapes, shapes_builder


def test_processes_encode_the_same_examples_in_order():
    # Enough blocks for a pool where there are two cores.
    blocks = list(shapes_builder._encode_all("train", 60, 8, group=7))
    assert [len(block) for block in blocks] == [7] * 8 + [4]
    for index, example in enumerate(example for block in blocks for example in block):
        sample = shapes.render("train", index, 8)
        assert (np.asarray(Image.open(io.BytesIO(example["image"]))) == sample.image).all()
        assert (example["caption"], example["label"]) == sample[1:]


def test_layout_on_disk_is_read_by_tfds_alone(tmp_path):
    config = shapes_builder.ShapesConfig(name="tiny", image_size=8, train=5, validation=3, zero_shot=2)
    shapes_builder.Shapes(config=config, data_dir=tmp_path, file_format="array_record").download_and_prepare()
    builder = tfds.builder_from_directory(tmp_path / "shapes" / "tiny" / "1.0.0")
    for split, count in (("train", 5), ("validation", 3), ("zero_shot", 2)):
        records = builder.as_data_source(split)
        assert len(records) == count
        for index in range(count):
            record, sample = records[index], shapes.render(split, index, 8)
            assert (record["image"] == sample.image).all()
            assert (record["caption"].decode(), record["label"]) == sample[1:]
