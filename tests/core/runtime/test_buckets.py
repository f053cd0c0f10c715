"""The closed set of program shapes holds every step that a scheduler may plan, and stays small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.runtime.buckets import Bucket, make_buckets
from jaxserve.errors import MissingProgramError

LIMITS = {"cpu": 12, "gpu": 40, "tpu": 40}


@given(st.sampled_from(["cpu", "gpu", "tpu"]), st.integers(1, 1024), st.integers(0, 8192), st.data())
def test_every_legal_step_has_a_small_enough_bucket(platform: str, rows: int, extra: int, data: st.DataObject) -> None:
    budget = rows + 32 + extra
    table = make_buckets(platform, rows, budget)
    assert len(table.buckets) + 2 * len(table.row_counts) <= LIMITS[platform]
    num_rows = data.draw(st.integers(1, rows))
    num_tokens = data.draw(st.integers(num_rows, budget))
    bucket = table.find(num_tokens, num_rows)
    assert bucket in table.buckets
    assert bucket.tokens >= num_tokens and bucket.rows >= num_rows
    assert bucket.is_decode == (num_tokens == num_rows)
    smaller = [b for b in table.buckets if b.is_decode == bucket.is_decode and b < bucket]
    assert all(b.tokens < num_tokens or b.rows < num_rows for b in smaller)


def test_defaults_on_cpu() -> None:
    table = make_buckets("cpu", 32, 512)
    assert table.row_counts == (2, 8, 32)
    assert [b.tokens for b in table.buckets if not b.is_decode] == [64, 192, 512]


def test_a_single_row_is_padded_to_two_but_on_tpus() -> None:
    assert make_buckets("cpu", 1, 64).find(1, 1) == make_buckets("gpu", 1, 64).find(1, 1) == Bucket(2, 2)
    assert make_buckets("tpu", 1, 64).find(1, 1) == Bucket(1, 1)


def test_what_does_not_fit_is_an_error() -> None:
    table = make_buckets("cpu", 8, 64)
    for tokens, rows in ((65, 8), (9, 9), (20, 9)):
        with pytest.raises(MissingProgramError, match=f"{tokens} tokens in {rows} rows"):
            table.find(tokens, rows)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_given_sizes_are_the_sizes(platform: str) -> None:
    table = make_buckets(platform, 6, 100, decode_rows=(3, 8), mixed_tokens=(50, 100))
    assert (table.row_counts, table.token_counts) == ((3, 8), (50, 100))
    assert (table.find(4, 4), table.find(9, 1)) == (Bucket(8, 8), Bucket(50, 8))
    assert table.largest == Bucket(100, 8)


def test_one_kind_of_sizes_may_be_given() -> None:
    table = make_buckets("gpu", 6, 500, decode_rows=(40,))
    assert table.row_counts == (40,) and table.token_counts[0] == 72 and table.token_counts[-1] == 500
    assert len(table.token_counts) <= LIMITS["gpu"] - 3
    table = make_buckets("gpu", 6, 500, mixed_tokens=(500,))
    assert table.token_counts == (500,) and table.row_counts[-1] == 6 and len(table.row_counts) > 1


def test_a_verify_step_gets_the_smallest_bucket_of_its_width() -> None:
    table = make_buckets("gpu", 8, 64).with_verify([(1, 4), (4, 4), (8, 2)])
    found = {(rows, width): table.find(rows * width, rows, width) for rows, width in ((1, 4), (2, 4), (4, 4), (1, 2))}
    assert {step: (bucket.rows, bucket.width) for step, bucket in found.items()} == {
        (1, 4): (1, 4),
        (2, 4): (4, 4),
        (4, 4): (4, 4),
        (1, 2): (8, 2),
    }
    with pytest.raises(MissingProgramError, match="verifies 5 rows"):
        table.find(20, 5, 4)
