"""Batches of queries with passages: order, choice of passages, processes, resume and damaged records."""

import json

import numpy as np
import pytest

from infcl_jax.data import BadRecordError, PairTexts, QuerySource, load_tokenizer, pair_iterator

EXAMPLES, NEGATIVES = 12, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    records = [
        {"query": f"q{i}", "pos": [f"p{i}{j}" for j in range(5)], "neg": [f"n{i}{j}" for j in range(i % 5)]}
        for i in range(EXAMPLES)
    ]
    path = tmp_path_factory.mktemp("pairs") / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def batches(path, count, state=None, **changes):
    """Decoded queries, passages (None for padding) and indices of some batches, and the state after them."""
    texts = PairTexts(load_tokenizer("bytes", 8))
    options = {"batch_size": 4, "hard_negatives": NEGATIVES, "seed": 3, "num_workers": 0, "num_threads": 1} | changes
    data = pair_iterator(QuerySource(path), texts, **options)
    try:
        if state is not None:
            data.set_state(state)
        result = []
        for batch in (next(data) for _ in range(count)):
            passages = zip(batch["passage"], batch["passage_mask"], strict=True)
            decoded = [texts.tokenizer.decode(ids) if present else None for ids, present in passages]
            queries = [texts.tokenizer.decode(ids) for ids in batch["query"]]
            result.append((queries, decoded, batch["index"].tolist()))
        return result, data.get_state()
    finally:
        data.close()


@pytest.mark.parametrize("positive", ["first", "random"])
def test_passages_belong_to_their_query(path, positive):
    drawn, _ = batches(path, 12, positive=positive)  # four epochs
    seen = set()
    for queries, passages, index in drawn:
        for row, (query, i) in enumerate(zip(queries, index, strict=True)):
            first, *negatives = passages[row * (1 + NEGATIVES) : (row + 1) * (1 + NEGATIVES)]
            size = min(NEGATIVES, i % 5)
            assert query == f"q{i}" and first[:-1] == f"p{i}" and negatives[size:] == [None] * (NEGATIVES - size)
            assert len(set(negatives[:size])) == size and all(n[:-1] == f"n{i}" for n in negatives[:size])
            seen.add((i, first, *negatives))
    for epoch in range(4):
        assert sorted(i for _, _, index in drawn[3 * epoch : 3 * epoch + 3] for i in index) == list(range(EXAMPLES))
    assert len(seen) == EXAMPLES if positive == "first" else len(seen) > 2 * EXAMPLES


def test_processes_share_the_batch_and_a_resumed_iterator_continues(path):
    whole, _ = batches(path, 5, positive="random")
    parts = [batches(path, 5, positive="random", process_index=i, process_count=2)[0] for i in range(2)]
    assert whole == [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(*parts, strict=True)]
    start, state = batches(path, 2, positive="random")
    assert start + batches(path, 3, state=state, positive="random")[0] == whole


def test_a_damaged_record_is_replaced_up_to_a_limit(path, tmp_path):
    damaged = tmp_path / "damaged.jsonl"
    lines = path.read_text().splitlines()
    damaged.write_text("\n".join([*lines[:5], '{"query": "q5"}', *lines[6:]]))
    drawn, _ = batches(damaged, 3)
    assert sorted(np.concatenate([index for _, _, index in drawn])) == sorted([*range(5), 6, *range(6, EXAMPLES)])
    with pytest.raises(BadRecordError, match=r"record 5 of .*damaged\.jsonl"):
        batches(damaged, 3, max_bad_records=0)


def test_a_batch_larger_than_the_data_is_refused(path):
    with pytest.raises(
        ValueError, match=r"batch_size must be at most the 12 examples of .*train\.jsonl, split train, got 16"
    ):
        batches(path, 1, batch_size=16)
