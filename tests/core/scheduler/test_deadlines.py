"""Deadlines: whoever is past his is found once, and ended requests leave nothing that could end others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.scheduler.deadlines import Deadlines

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 40)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 10), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_equals_a_look_at_all_of_them(actions: list[tuple[str, int, int]]) -> None:
    deadlines, known, now = Deadlines(), {}, 0
    for action, value, after in actions:
        name = f"r{value}"
        if action == "add" and name not in known:  # ids come again, with other deadlines
            known[name] = now + after
            deadlines.add(name, now + after)
        elif action == "drop":
            known.pop(name, None)
            deadlines.drop(name)
        elif action == "wait":
            now += value
            expected = [name for name, deadline in known.items() if deadline <= now]
            found = deadlines.pop_expired(now)
            assert sorted(found) == sorted(expected)
            assert [known[name] for name in found] == sorted(known[name] for name in found)
            for each in expected:
                del known[each]
        assert len(deadlines) == len(known)


def test_requests_that_end_in_time_leave_no_memory_behind() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.add(f"r{index}", 1e9 + index)
        deadlines.drop(f"r{index}")
    assert len(deadlines._heap) < 200
    assert deadlines.pop_expired(2e9) == []
