"""Tables of Hugging Face datasets, img2dataset and pandas, for `tests/data/sources/test_table_writers.py`.

    NO_ALBUMENTATIONS_UPDATE=1 python tests/golden/make_tables.py

Written with datasets 5.2.0, img2dataset 1.47.0 and pandas 2.3.3 on Python 3.12, Linux.
"""

import contextlib
import functools
import http.server
import io
import json
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from datasets.table import embed_table_storage
from img2dataset import download
from PIL import Image as PillowImage

FOLDER = Path(__file__).parent / "tables"
CAPTIONS = ["a zebra", 'an "ant", seen\nfrom above', "a zebra, again", "two ants"]
LISTS = [[caption, f"{i}: it's"] for i, caption in enumerate(CAPTIONS)]


def png(number):
    buffer = io.BytesIO()
    PillowImage.new("RGB", (4, 3), (60 * number, 0, 0)).save(buffer, format="png")
    return buffer.getvalue()


def hugging_face(folder):
    """Write datasets with embedded images, with paths, and with both."""
    features = Features(
        {"image": Image(), "captions": List(Value("string")), "label": ClassLabel(names=["zebra", "fire_ant"])}
    )
    paths = [f"{i}.png" for i in range(4)]
    for i, path in enumerate(paths):
        (folder / path).write_bytes(png(i))
    rows = Dataset.from_dict({"image": paths, "captions": LISTS, "label": [0, 1, 0, 1]}, features=features)
    rows.to_parquet(FOLDER / "hugging_face_paths.parquet")
    rows.to_json(FOLDER / "hugging_face.jsonl")
    embedded = rows.with_format("arrow").map(embed_table_storage, batched=True).with_format(None)
    embedded.to_parquet(FOLDER / "train-00000-of-00001.parquet")
    mixed = rows.cast_column("image", Image(decode=False)).to_dict()
    mixed["image"][1] = {"bytes": png(1), "path": "not_used.png"}
    mixed["image"][3] = None
    Dataset.from_dict(mixed, features=features).to_parquet(FOLDER / "hugging_face_mixed.parquet")


def pandas():
    """Write tables of paths with categories, lists and arrays of captions, and quoted texts."""
    rows = pd.DataFrame({"filepath": [f"{i}.png" for i in range(4)], "title": CAPTIONS})
    rows.to_csv(FOLDER / "pandas.csv", index=False)
    rows.to_csv(FOLDER / "pandas.tsv", index=False, sep="\t")  # as OpenCLIP's gather_cc.py
    rows.astype({"title": "category"}).to_parquet(FOLDER / "pandas_category.parquet")
    lists = rows.assign(title=LISTS)
    lists.to_csv(FOLDER / "pandas_lists.csv", index=False)
    lists.assign(title=[json.dumps(texts) for texts in LISTS]).to_csv(FOLDER / "pandas_json.csv", index=False)
    lists.assign(title=[np.array(texts, object) for texts in LISTS]).to_csv(FOLDER / "pandas_arrays.csv", index=False)


def img2dataset(folder):
    """Download four images in two shards: the second fails, the third has no caption."""
    for i in (0, 2, 3):
        (folder / f"{i}.png").write_bytes(png(i))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8731), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = pd.DataFrame(
            {"url": [f"http://127.0.0.1:8731/{i}.png" for i in range(4)], "text": ["a", "b", None, "d"]}
        )
        urls.to_parquet(folder / "urls.parquet")
        for kind in ("webp", "png"):
            download(
                url_list=str(folder / "urls.parquet"),
                input_format="parquet",
                url_col="url",
                caption_col="text",
                output_folder=str(folder / kind),
                output_format="parquet",
                encode_format=kind,
                encode_quality=9 if kind == "png" else 95,
                number_sample_per_shard=2,
                processes_count=1,
                thread_count=1,
                retries=0,
            )
            for shard in sorted((folder / kind).glob("*.parquet")):
                (FOLDER / f"img2dataset_{kind}").mkdir(exist_ok=True)
                shutil.copy(shard, FOLDER / f"img2dataset_{kind}")
        server.shutdown()


def main():
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        with contextlib.chdir(first):  # paths are relative to it
            hugging_face(Path(first))
        img2dataset(Path(second))
    pandas()


if __name__ == "__main__":
    main()
