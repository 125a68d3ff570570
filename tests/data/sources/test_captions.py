import json

import pytest

from infcl_jax.data.sources import captions


@pytest.mark.parametrize(
    "value", ['"a "', '["a", null, " "]', '{"caption": NaN, "text": "a"}', '{"captions": ["", "a"]}']
)
def test_blank_captions_are_left_out(value):
    assert captions.json_captions(value.encode()) == ["a"]


@pytest.mark.parametrize("value", ["3", "true", "[1]", '{"caption": {"a": 1}}', '{"caption": [["a"]]}'])
def test_other_types_are_errors(value):
    with pytest.raises(ValueError, match=r"^expected JSON with a text or texts in one of caption, captions, .*, got "):
        captions.json_captions(value.encode())


LISTS = [["a dog", "a brown dog"], ["it's", 'a "dog"'], ["line\nbreak", "back\\slash \\d", "猫 \xa0é"], ["one"], []]


@pytest.mark.parametrize("texts", LISTS)
@pytest.mark.parametrize("write", [str, json.dumps, lambda texts: " ".join(map(repr, texts)).join("[]")])
def test_lists_in_cells(texts, write):
    assert captions.cell_captions(write(texts)) == texts


@pytest.mark.parametrize("cell", ["['a', nan, None, '', 'b']", '["a", null, NaN, "", "b"]'])
def test_cells_without_missing_captions(cell):
    assert captions.cell_captions(cell) == ["a", "b"]


@pytest.mark.parametrize(
    "cell",
    ["a dog", "[a dog]", "[1, 2]", "['a' + 'b']", "['a', ['b']]", r"['\d']", "['a", "[[" * 2000 + "]"]
)  # fmt: skip
def test_other_cells_are_texts(cell):
    assert captions.cell_captions(cell) == [cell]
