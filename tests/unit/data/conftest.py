"""Hypothesis measures no time here: cores are shared, and a slow example proves nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
