"""Tar files and folders of webdataset and img2dataset, for `tests/data/sources/test_tar_writers.py`.

    NO_ALBUMENTATIONS_UPDATE=1 python tests/golden/make_tars.py

Written with webdataset 0.2.111 and img2dataset 1.47.0 on Python 3.12, Linux.
"""

import functools
import http.server
import shutil
import tempfile
import threading
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import webdataset
from img2dataset import download

FOLDER = Path(__file__).parent / "tars"
KEYS = ["plain", "v1.0/folder", "grün/" + "x" * 120, "dotted.5mm", "plain.again"]
# The first image has a caption, the third has no file, and the others have none.
CAPTIONS = ["caption 0", None, "caption 2", "", "caption 4"]


def png(number):
    return cv2.imencode(".png", np.full((3, 4, 3), 40 * number, np.uint8))[1].tobytes()


def write_webdataset():
    """Write two shards, and a compressed one."""
    pattern = f"{FOLDER}/webdataset-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=3, verbose=0, mtime=0) as writer:
        for i, key in enumerate(KEYS):
            writer.write({"__key__": key, "png": png(i), "txt": f"caption {i}", "json": {"caption": None}})
    with webdataset.TarWriter(f"{FOLDER}/compressed.tar.gz", mtime=0) as writer:
        writer.write({"__key__": "0", "png": png(0), "txt": "caption 0"})


def write_img2dataset(folder):
    """Download images in the layouts of tar files and of files, with two samples in each shard."""
    for i in (0, 1, 3, 4):
        (folder / f"{i}.png").write_bytes(png(i))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8732), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [f"http://127.0.0.1:8732/{i}.png" for i in range(len(CAPTIONS))]
        pd.DataFrame({"url": urls, "text": CAPTIONS}).to_parquet(folder / "urls.parquet")
        for layout in ("webdataset", "files"):
            output = FOLDER / f"img2dataset_{layout}"
            download(
                url_list=str(folder / "urls.parquet"),
                input_format="parquet",
                url_col="url",
                caption_col="text",
                output_folder=str(output),
                output_format=layout,
                encode_format="png",
                encode_quality=9,
                image_size=4,
                number_sample_per_shard=3,
                processes_count=1,
                thread_count=1,
                retries=0,
            )
        server.shutdown()


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    write_webdataset()
    with tempfile.TemporaryDirectory() as folder:
        write_img2dataset(Path(folder))


if __name__ == "__main__":
    main()
