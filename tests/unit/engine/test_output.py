from __future__ import annotations

from drumline.engine.output import describe_failure
from drumline.errors import DataError, Place, UsageError

PLACE = Place(host="node-b", rank=3, step=12)


def test_our_own_errors_explain_themselves_and_where() -> None:
    text = describe_failure(DataError("no data in /x", next_step="mount it"), PLACE)
    assert text == "drumline: error: no data in /x [rank 3 on node-b, step 12]\n  next: mount it\n"


def test_a_wrong_command_is_wrong_everywhere() -> None:
    before_the_first_step = Place(host="node-b", rank=3)
    assert (
        describe_failure(UsageError("no such task"), before_the_first_step)
        == "drumline: error: no such task\n"
    )
    assert "[rank 3 on node-b, step 12]" in describe_failure(UsageError("Loss.total has a shape"), PLACE)


def test_other_errors_show_their_traceback_below_where_they_happened() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        lines = describe_failure(error, PLACE).splitlines()
    assert lines[0] == "drumline: rank 3 on node-b, step 12 failed: ValueError: boom"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"
