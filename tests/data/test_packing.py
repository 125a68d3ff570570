"""Plans of packed texts: every text once, within its row, in the same place for any order of shards."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_jax.data.packing import Packing

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=60).map(np.array)


def captions(count, seed=0):
    """Numbers of tokens of web captions, as CLIP's tokenizer counts them."""
    lengths = 2 + np.round(np.random.default_rng(seed).lognormal(np.log(17), 0.5, count))
    return np.clip(lengths, 3, 77).astype(int)


def padded(lengths):
    return np.ones((len(lengths), lengths.max()), np.int32)


@given(LENGTHS, st.integers(1, 20), st.sampled_from([32, 48]))
def test_texts_lie_side_by_side_in_the_rows_of_their_shard(lengths, shard, row_length):
    packing = Packing(row_length, shard, shard)  # a row for each text, which always suffices
    packed = packing.pack(padded(lengths), lengths, block=len(lengths))
    for start in range(0, len(lengths), shard):
        rows = slice(start, start + shard)
        taken = np.zeros((shard, row_length), int)
        for row, offset, length in zip(packed.row[rows], packed.offset[rows], packed.length[rows], strict=True):
            assert offset + length <= row_length
            taken[row, offset : offset + length] += 1
        assert taken.max() == 1
        assert taken.sum() == lengths[rows].sum()


@given(LENGTHS, st.integers(1, 8))
def test_a_plan_is_refused_only_without_room(lengths, rows):
    packed = Packing(32, rows, len(lengths)).pack(padded(lengths), lengths, block=len(lengths))
    if packed is None:
        assert lengths.sum() > 32 * rows // 2  # best fit leaves at most half of the rows free
    else:
        assert packed.row.max() < rows


@given(LENGTHS, LENGTHS)
def test_the_plan_of_a_block_does_not_depend_on_the_others(first, second):
    size = min(len(first), len(second))
    first, second = first[:size], second[:size]
    both = np.concatenate([first, second])
    packing = Packing(32, size, size)
    together = packing.pack(padded(both), both, block=size)
    alone = packing.pack(padded(second), second, block=size)
    np.testing.assert_array_equal(together.row[size:], alone.row)
    np.testing.assert_array_equal(together.offset[size:], alone.offset)


@pytest.mark.parametrize("count", [256, 1024, 4096])
@pytest.mark.parametrize("row_length", [128, 256])
def test_web_captions_take_three_tenths_of_their_padded_tokens(count, row_length):
    packing = Packing.of(captions(20_000), count, row_length)
    assert packing.tokens_per_text / 77 < 0.32
    batches = [captions(count, seed) for seed in range(1, 41)]
    fit = [packing.pack(padded(lengths), lengths, block=count) is not None for lengths in batches]
    assert np.mean(fit) >= 0.95


def test_a_smaller_last_shard_has_rows_in_proportion():
    lengths = np.full(10, 16)
    packing = Packing(32, rows=2, shard=4)
    packed = packing.pack(padded(lengths), lengths, block=10)
    assert packed.row.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert Packing(32, rows=1, shard=4).pack(padded(lengths), lengths, block=10) is None


@pytest.mark.parametrize(
    ("lengths", "found"), [([3, 200], "3 to 200"), ([0, 3], "0 to 3"), ([], "no texts")], ids=["long", "empty", "none"]
)
def test_a_profile_of_other_lengths_is_refused(lengths, found):
    with pytest.raises(ValueError, match=f"expected texts of 1 to 128 tokens, the row length, got {found}"):
        Packing.of(np.array(lengths, int), shard=4)


def test_packed_tokens_are_a_pytree_with_a_row_a_text():
    lengths = np.array([3, 1, 2])
    packed = Packing(8, 1, 3).pack(padded(lengths), lengths, block=3)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(packed)} == {3}


@given(LENGTHS, st.integers(1, 12), st.integers(1, 4))
def test_the_first_texts_fill_the_shards_in_order(lengths, texts, devices):
    packing, tokens = Packing.within(texts, 32), np.arange(len(lengths))[:, None] + np.zeros((1, 32), np.int32)
    if packing is None:
        assert texts < 4  # padded texts of 32 tokens have fewer tokens than a row
        return
    assert packing.rows * packing.row_length <= 32 * texts
    packed, is_text = packing.pack_first(tokens, lengths, devices)
    number = packed.tokens[:, 0]
    assert number[is_text].tolist() == list(range(is_text.sum()))
    np.testing.assert_array_equal(packed.length, np.where(is_text, lengths[number], 0))
    for shard in np.split(np.arange(len(number)), devices):
        taken = np.zeros((packing.rows, packing.row_length), int)
        for row, offset, length in zip(packed.row[shard], packed.offset[shard], packed.length[shard], strict=True):
            taken[row, offset : offset + length] += 1
        assert taken.max() <= 1
    if is_text.sum() < len(lengths):  # as many texts as the shard has, or nearly full rows
        counts = is_text.reshape(devices, -1).sum(1)
        tokens_of = np.add.reduceat(lengths[: is_text.sum()], np.cumsum(counts) - counts)
        assert np.all((counts == packing.shard) | (tokens_of > 0.7 * packing.rows * packing.row_length - 32))
