"""Results as a table and as one line."""

import pytest

from infcl_jax.evaluation import format_line, format_table

RESULTS = {
    "validation/loss": 1.23456,
    **{f"retrieval/{way}_r{k}": 0.5 + k / 20 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)},
    "zero_shot/top1": 0.942,
    "zero_shot/top5": 1.0,
}
TABLE = """\
                                 k = 1    k = 5   k = 10
retrieval image to text (R@k)   55.0 %   75.0 %  100.0 %
retrieval text to image (R@k)   55.0 %   75.0 %  100.0 %
zero-shot (top-k accuracy)      94.2 %  100.0 %
validation loss (nats)          1.2346"""
LINE = "  ".join(
    (
        "validation/loss 1.2346",
        "retrieval/image_to_text_r1 55.0 %",
        "retrieval/text_to_image_r1 55.0 %",
        "zero_shot/top1 94.2 %",
    )
)


@pytest.mark.parametrize(
    ("results", "table", "line"),
    [
        (RESULTS, TABLE, LINE),
        ({"validation/loss": 2.0}, "validation loss (nats)   2.0000", "validation/loss 2.0000"),
        ({}, "", ""),
        (
            {
                "vtab/pets/top1": 0.5,
                "vtab/pets/mean_per_class_recall": 0.25,
                "suite/datacomp38/average_of_1_of_38": 0.25,
            },
            """\
                                       k = 1
vtab pets (top-k accuracy)            50.0 %
vtab pets mean per class recall       25.0 %
suite datacomp38 average of 1 of 38   25.0 %""",
            "vtab/pets/top1 50.0 %  suite/datacomp38/average_of_1_of_38 25.0 %",
        ),
    ],
)
def test_results_are_formatted(results, table, line):
    assert format_table(results) == table
    assert format_line(results) == line
