import itertools

import numpy as np
import pytest

from infcl_jax.data.iterator import STATS, TrainIterator
from infcl_jax.data.reader import BAD_RECORDS, as_array


class Numbers:
    """Samples that are not read, in their order."""

    name, split = "numbers", "train"

    def __len__(self):
        return 10**4


def chunk(rows):
    number = rows[0][0] // 2
    stats = {"chunks": 1, "sum": number / 2} | ({"seventh": 1} if number % 7 == 0 else {})
    return {"row": np.array([row for row, _ in rows]), BAD_RECORDS: as_array({}), STATS: stats}


@pytest.fixture
def open_iterator(monkeypatch):
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", 2)

    def opened(chunks_per_batch=3):
        return TrainIterator(Numbers(), chunk, batch_size=2 * chunks_per_batch, seed=0, row_bytes=8, num_threads=2)

    return opened


@pytest.mark.parametrize("chunks_per_batch", [1, 3])
def test_statistics_of_the_returned_batches_are_summed(chunks_per_batch, open_iterator):
    iterator = open_iterator(chunks_per_batch)
    assert iterator.stats() == {}
    for count, batch in enumerate(itertools.islice(iterator, 4), start=1):
        chunks = range(count * chunks_per_batch)
        assert batch.keys() == {"row"} and batch["row"][-1] == 2 * len(chunks) - 1
        expected = {"chunks": len(chunks), "sum": sum(chunks) / 2, "seventh": len(chunks[::7])}
        assert expected.items() <= iterator.stats().items()
    iterator.close()


def test_statistics_of_a_chunk_that_is_read_again_count_once(open_iterator):
    iterator = open_iterator()
    reader = iterator.next_reader()
    for _ in range(2):
        assert reader.read([slice(1, 6)])["row"].tolist() == [1, 2, 3, 4, 5]
    assert iterator.stats() == {"chunks": 3, "sum": 1.5, "seventh": 1}
    iterator.close()
