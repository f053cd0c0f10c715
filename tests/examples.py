"""How many examples hypothesis draws: all, or a fifth of them under the profile `quick`, which CI runs with."""

from __future__ import annotations

from hypothesis import settings

FEWEST = 10


def register_profiles() -> None:
    """For conftest.py: pytest's `--hypothesis-profile quick` must find the profile. No clock decides a test."""
    settings.register_profile("full", deadline=None)
    settings.load_profile("full")
    settings.register_profile("quick", max_examples=20)


def scale_examples(count: int) -> int:
    """Returns `max_examples` for a test that draws `count` of them when it draws all."""
    return min(
        count, max(FEWEST, count * settings.get_profile(settings.get_current_profile_name()).max_examples // 100)
    )
