import csv
import io
import json
from random import Random

import captioned
import pytest

from infcl_jax.data import load_source
from infcl_jax.data.sources import text_tables
from infcl_jax.data.sources.table_file import TableFile

COUNT = 6


@pytest.fixture
def folder(tmp_path):
    return captioned.write_folder(tmp_path, [(str(i), {"jpg": captioned.jpeg(i)}) for i in range(COUNT)])


@pytest.fixture(params=[text_tables._QUOTES_BLOCK, 7])
def block(request, monkeypatch):
    monkeypatch.setattr(text_tables, "_QUOTES_BLOCK", request.param)


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
@pytest.mark.usefixtures("block")
def test_quotes_of_tsv_without_quoting_are_text(folder, caplog, case, line_break):
    changed, line = STRAY[case]
    captions = [changed.get(i, caption) for i, caption in enumerate(CAPTIONS)]
    rows = ["file\ttitle", *(f"{i}.jpg\t{caption}" for i, caption in enumerate(captions))]
    (folder / "a.tsv").write_bytes(line_break.join(rows).encode())
    assert texts(load_source(f"{folder}/a.tsv", "train")) == captions
    assert caplog.text.count(f"a.tsv: the quote in line {line} does not enclose a cell") == 1


@pytest.mark.parametrize("case", STRAY)
@pytest.mark.usefixtures("block")
def test_stray_quotes_of_csv_are_a_warning(folder, caplog, case):
    changed, line = STRAY[case]
    rows = ["file,title", *(f"{i}.jpg,{changed.get(i, 'a')}" for i in range(COUNT))]
    (folder / "a.csv").write_text("\n".join(rows))
    load_source(f"{folder}/a.csv", "train")
    assert caplog.text.count(f"a.csv: the quoted cell in line {line} ") == 1
    assert caplog.text.count("which can swallow the rows behind it") == 1


def test_long_quoted_cells_are_found_in_linear_time():
    data = b'a,"' + b'x""' * 10**5 + b"\n" * 10**5 + b'"\n'
    found = text_tables.scan_quotes(io.BytesIO(data), ",", lambda lines: [])
    assert found == text_tables.Quotes(present=True, line_breaks=True)
    data = b'x\n"a\n"\n' * 10**5 + b'"a'
    assert text_tables.scan_quotes(io.BytesIO(data), ",", lambda lines: []).stray == 3 * 10**5 + 1


PIECES = ['"', '""', "\n", "\r\n", "\t", ",", "a", ' 5" x', "1.jpg\tb", "0.jpg,c", "猫", " "]
PIECES += ["\n2.jpg\td\n", "\n2.jpg,e\n"]


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.usefixtures("block")
def test_tables_of_csv_writers_are_read_exactly(folder, caplog, separator):
    """Also where captions look like rows of the table, so that they would be rows without quotes."""
    random = Random(0)
    names = [f"{i}.jpg" for i in range(COUNT)]
    for number in range(60):
        captions = ["".join(random.choices(PIECES, k=random.randrange(6))) for _ in names]
        columns = [("image", names), ("caption", captions), ("n", captions[::-1])][: random.choice([2, 3])]
        random.shuffle(columns)
        path = folder / f"{number}.csv"
        with open(path, "w", newline="") as file:
            writer = csv.writer(
                file,
                delimiter=separator,
                quoting=random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
                lineterminator=random.choice(["\n", "\r\n"]),
            )
            writer.writerow([name for name, _ in columns])
            writer.writerows(zip(*(values for _, values in columns), strict=True))
        expected = [caption.strip() for caption in captions if caption.strip()]
        if expected:
            table = TableFile(str(path), {})
            assert [table.captions(row)[0] for row in range(len(table))] == expected
            assert table.dropped.keys() <= {"no caption"}
    assert not caplog.records


@pytest.mark.usefixtures("block")
def test_quotes_of_tsv_are_those_of_python_or_text(folder, caplog):
    """A table that Python reads with whole rows and closed cells is read in that way."""
    random = Random(0)
    counts = {True: 0, False: 0}
    for number in range(80):
        captions = ["a" + "".join(random.choices(["b", '"', '""', " c"], k=3)) for _ in range(COUNT)]
        captions[random.randrange(COUNT)] = random.choice(['"a', '"a" b', '"', '"""a'])
        path = folder / f"{number}.tsv"
        path.write_text("caption\tfile\n" + "".join(f"{text}\t{i}.jpg\n" for i, text in enumerate(captions)))
        caplog.clear()
        table = TableFile(str(path), {})
        with open(path, newline="") as file:
            try:
                _, *rows = csv.reader(file, "excel-tab", strict=True)
            except csv.Error:
                rows = []
        quoted = bool(rows) and all(len(row) == 2 for row in rows)
        counts[quoted] += 1
        assert [table.captions(row)[0] for row in range(len(table))] == (
            [row[0].strip() for row in rows] if quoted else captions
        )
        assert ("can swallow the rows" if quoted else "quotes are read as text") in caplog.text and not table.dropped
    assert min(counts.values()) > 5


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("extension", ["", ".jpg"])
@pytest.mark.parametrize("image", [0, 1])
def test_quotes_that_swallow_rows_are_a_warning(folder, caplog, separator, extension, image):
    rows = [["image", "caption"], ["0", "a"], ["1", '"b'], ["2", "c"], ["3", 'd"'], ["4", "e"]]
    for name, _ in rows[1:]:
        (folder / f"{name}{extension}").write_bytes(captioned.jpeg(0))
    cells = [rows[0], *([name + extension, text] for name, text in rows[1:])]
    lines = [separator.join(row if image == 0 else row[::-1]) for row in cells]
    (folder / "a.csv").write_text("\n".join(lines))
    load_source(f"{folder}/a.csv", "train")
    assert caplog.text.count("a.csv: the quoted cell in line 3 or a later one has") == 1


def test_wrong_number_of_quoted_cells_means_quotes_are_text(folder, caplog):
    (folder / "a.tsv").write_text('image\tcaption\tn\tm\n0.jpg\t"a\tb\tc\n1.jpg\td\te"\tf\n')
    assert texts(load_source(f"{folder}/a.tsv", "train")) == ['"a', "d"]
    assert "1 rows have too few or too many; all quotes are read as text" in caplog.text


@pytest.mark.parametrize("separator", [";", "|"])
def test_other_separators(folder, separator):
    (folder / "a.csv").write_text(f'image{separator} caption\n0.jpg{separator} "a, b"\n1.jpg{separator} c\n')
    assert texts(load_source(f"{folder}/a.csv", "train")) == ['"a, b"', "c"]


def test_tables_without_header_say_so(folder):
    (folder / "a.tsv").write_text("a dog\thttp://x/0.jpg\n")
    with pytest.raises(ValueError, match=r"no image column; its columns are a dog, http.* or put a line of names"):
        load_source(f"{folder}/a.tsv", "train")


def test_lone_surrogates_are_replaced(folder, caplog):
    path = write_lines(folder, [{"text": "a"}, {"text": "b\ud83d"}, {"text": "c\U0001f600"}])
    assert texts(load_source(path, "train")) == ["a", "b\ufffd", "c\U0001f600"]
    assert "1 values have half of a surrogate pair, read as U+FFFD, the first in line 2" in caplog.text


def test_nan_in_lists_is_no_caption(folder):
    source = load_source(write_lines(folder, [{"text": ["a"]}, {"text": [float("nan")]}]), "train")
    assert texts(source) == ["a"] and source.dropped == {"no caption": 1}


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
