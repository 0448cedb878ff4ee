"""docs/settings.md is what the schema declares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drumline.config.fields import FIELDS
from tests.settings_page import setting_row, settings_page

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_in_step_with_the_schema() -> None:
    assert PAGE.read_text() == settings_page(), "python -m tests.settings_page docs/settings.md"


def test_a_row_has_type_default_doc_and_what_differs_from_the_experiment() -> None:
    field = replace(FIELDS["data.workers"], default=3)
    row = setting_row("data.workers", field, "How many.")
    assert row == "| `data.workers` | whole number at least 0 | `3` | How many. *(machine)* |\n"
