"""The last key that each token of a step sees where tokens of an image see each other."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.core.runtime.batches import find_last_keys
from jaxserve.request import FIRST_IMAGE_ROW

NUM_TOKENS, NUM_ROWS = 24, 5
ROWS = st.lists(st.tuples(st.integers(0, 40), st.text("ti", min_size=1, max_size=6)), max_size=4)


@example([(3, "t"), (0, "iii"), (0, "iit"), (32, "tiit")])  # two rows meet in images
@given(ROWS)
def test_tokens_of_an_image_see_its_last_one(rows: list[tuple[int, str]]) -> None:
    ids, ends, lengths, expected = [], [0], [], []
    for computed, kinds in rows:
        for index, kind in enumerate(kinds):
            ids.append(FIRST_IMAGE_ROW - len(ids) if kind == "i" else -1 if index else 7)
            rest = kinds[index:]
            run = len(rest) - len(rest.lstrip("i"))  # of placeholders from here on
            expected.append(computed + index + max(run - 1, 0))
        ends.append(len(ids))
        lengths.append(computed + len(kinds))
    ids += [0] * (NUM_TOKENS - len(ids))
    ends += [ends[-1]] * (NUM_ROWS - len(rows))
    lengths += [0] * (NUM_ROWS - len(rows))
    found = find_last_keys(*(np.array(each, np.int32) for each in (ids, lengths, ends)))
    assert np.asarray(found)[: len(expected)].tolist() == expected
