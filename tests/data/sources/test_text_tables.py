import csv
import io
import json

import captioned
import pytest

from infcl_jax.data import load_source
from infcl_jax.data.sources import quotes

COUNT = 6


@pytest.fixture(params=[quotes._BLOCK, 7])
def folder(tmp_path, request, monkeypatch):
    monkeypatch.setattr(quotes, "_BLOCK", request.param)
    return captioned.write_folder(tmp_path, [(str(i), {"jpg": captioned.jpeg(i)}) for i in range(COUNT)])


def texts(source):
    return [example["caption"] for example in captioned.read_all(source)]


CAPTIONS = ["a dog", 'a 5" pipe', 'said "a"', "x, y", "猫", "z"]
STRAY = {  # rows whose quotes no writer of quoted cells makes, and the line of the first
    "one": ({1: '"a dog'}, 3),
    "two": ({1: '"a dog', 3: '"a cat'}, 3),
    "closed in another row": ({1: '"a dog', 3: 'a cat"'}, 3),
    "text behind": ({2: '"a dog" runs'}, 4),
    "last": ({5: '"z'}, 7),
}


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
@pytest.mark.parametrize("case", STRAY)
def test_quotes_of_tsv_without_quoting_are_text(folder, caplog, case, line_break):
    changed, line = STRAY[case]
    captions = [changed.get(i, caption) for i, caption in enumerate(CAPTIONS)]
    rows = ["file\ttitle", *(f"{i}.jpg\t{caption}" for i, caption in enumerate(captions))]
    (folder / "a.tsv").write_bytes(line_break.join(rows).encode())
    assert texts(load_source(f"{folder}/a.tsv", "train")) == captions
    assert caplog.text.count(f"a.tsv: the quote in line {line} does not enclose a cell") == 1


@pytest.mark.parametrize("case", STRAY)
def test_stray_quotes_of_csv_are_a_warning(folder, caplog, case):
    changed, line = STRAY[case]
    rows = ["file,title", *(f"{i}.jpg,{changed.get(i, 'a')}" for i in range(COUNT))]
    (folder / "a.csv").write_text("\n".join(rows))
    load_source(f"{folder}/a.csv", "train")
    assert caplog.text.count(f"a.csv: the quoted cell in line {line} is not closed at its end") == 1


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_quoted_cells_are_no_stray_quotes(folder, caplog, separator, quoting, line_break):
    captions = ['"', 'a "b"\nc, d\t"e', '"quoted"', "", "x\r\n\r\ny, see 1.jpg", '""']
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting, lineterminator=line_break)
        writer.writerows([("file", "title"), *((f"{i}.jpg", caption) for i, caption in enumerate(captions))])
    assert texts(load_source(f"{folder}/a.csv", "train")) == [caption for caption in captions if caption]
    assert "in line" not in caplog.text


def test_long_quoted_cells_are_found_in_linear_time():
    data = b'a,"' + b'x""' * 10**5 + b"\n" * 10**5 + b'"\n'
    assert quotes.first_stray_quote(io.BytesIO(data), ",", lambda line: False) is None


def write_lines(folder, values):
    lines = [json.dumps({"file": f"{i}.jpg"} | value) for i, value in enumerate(values)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return f"{folder}/a.jsonl"


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (["a", ["b"]], "a text in line 1 and a list of texts in line 2"),
        ([None, ["a"], "b"], "a list of texts in line 2 and a text in line 3"),
        (["a", "b", 3], "a text in line 1 and a number in line 3"),
        ([["a"], [1]], "a list of texts in line 1 and a list of other values in line 2"),
        ([{"x": 1}, "a"], "an object in line 1 and a text in line 2"),
    ],
)
def test_mixed_types_name_column_and_lines(folder, values, kinds):
    path = write_lines(folder, [{"text": value} for value in values])
    with pytest.raises(ValueError, match=rf"column 'text' of .*a\.jsonl, got {kinds}; write all of them") as error:
        load_source(path, "train")
    assert "\n" not in str(error.value)


def test_other_columns_can_have_mixed_types_and_captions_nan(folder):
    values = [{"text": "a", "n": 1}, {"text": float("nan"), "n": "x"}, {"text": "c", "n": [1], "label": "k"}]
    source = load_source(write_lines(folder, values), "train")
    assert texts(source) == ["a", "c"] and source.dropped == {"no caption": 1}


def test_damaged_lines_are_named(folder):
    (folder / "a.jsonl").write_text('{"file": "0.jpg", "text": "a"}\r\n\r\n{"file": "1.jpg", "text": }\r\n')
    with pytest.raises(ValueError, match=r"expected JSON in line 3 of .*a\.jsonl, got Expecting value"):
        load_source(f"{folder}/a.jsonl", "train")
