"""The limit of pixels reaches every pipeline, and that of characters every tokenizer."""

import captioned
import pytest

from infcl_jax.data import Augmentation, BadRecordError, ByteTokenizer, eval_batches, load_source, train_iterator
from infcl_jax.data.decode.device import encoded_image


@pytest.mark.parametrize("pixels", [119, 120])  # of images with 120 pixels
def test_images_above_the_limit_are_bad(pixels, tmp_path):
    source = load_source(str(captioned.write_folder(tmp_path / "images", captioned.samples(2))), "train")
    options = {"tokenizer": ByteTokenizer(8), "image_size": 8, "batch_size": 2, "max_image_pixels": pixels}
    evaluated = next(iter(eval_batches(source, skip_bad=True, **options)))
    assert evaluated["mask"].all() == (pixels == 120)
    for augmentation in (Augmentation(), None):
        data = train_iterator(source, seed=0, num_workers=0, num_threads=1, augmentation=augmentation, **options)
        if pixels == 120:
            assert next(data)["index"].shape == (2,)
        else:
            with pytest.raises(
                BadRecordError, match="at most 119 pixels, got 12 x 10; max_image_pixels sets the limit"
            ):
                next(data)
        data.close()
    if pixels < 120:
        with pytest.raises(ValueError, match="at most 119 pixels"):
            encoded_image(captioned.jpeg(0), lambda height, width: None, pixels)


def test_only_the_start_of_a_long_text_is_encoded(monkeypatch):
    tokenizer, encoded = ByteTokenizer(8), []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda texts: encoded.extend(texts) or encode(texts))
    assert (tokenizer(["a" * 10**6]) == ByteTokenizer(8)(["a" * 100])).all()
    assert [len(text) for text in encoded] == [2**14]
