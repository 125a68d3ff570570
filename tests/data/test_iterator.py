import itertools
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from infcl_jax.data.bad_records import BAD_RECORDS, BadRecords, as_array
from infcl_jax.data.iterator import STATS, TrainIterator
from infcl_jax.data.parallelism import Parallelism


def chunk(number):
    stats = {"chunks": 1, "sum": number / 2} | ({"seventh": 1} if number % 7 == 0 else {})
    return {"row": np.array([2 * number, 2 * number + 1]), BAD_RECORDS: as_array({}), STATS: stats}


def open_iterator(chunks_per_batch=3, num_workers=0):
    return TrainIterator(
        grain.MapDataset.range(10**6).map(chunk),
        chunks_per_batch=chunks_per_batch,
        rows_per_chunk=2,
        identity={},
        bad_records=BadRecords(SimpleNamespace(name="numbers", split="train"), limit=0),
        parallelism=Parallelism(num_workers, num_threads=2, prefetch_batches=2, cores=2),
    )


@pytest.mark.parametrize("chunks_per_batch", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_of_the_returned_batches_are_summed(chunks_per_batch, num_workers):
    iterator = open_iterator(chunks_per_batch, num_workers)
    assert iterator.stats() == {}
    for count, batch in enumerate(itertools.islice(iterator, 4), start=1):
        chunks = range(count * chunks_per_batch)
        assert batch.keys() == {"row"} and batch["row"][-1] == 2 * len(chunks) - 1
        expected = {"chunks": len(chunks), "sum": sum(chunks) / 2, "seventh": len(chunks[::7])}
        assert expected.items() <= iterator.stats().items()
    iterator.close()


def test_statistics_of_a_chunk_that_is_read_again_count_once():
    iterator = open_iterator()
    reader = iterator.next_reader()
    for _ in range(2):
        assert reader.read([slice(1, 6)])["row"].tolist() == [1, 2, 3, 4, 5]
    assert iterator.stats() == {"chunks": 3, "sum": 1.5, "seventh": 1}
    iterator.close()
