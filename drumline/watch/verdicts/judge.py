"""What holds up the run? Facts in, a verdict out, and nothing else.

The order is that of suspicion. The cause is to be named, not those who wait for it, and not those who fell with it: so
what ended by itself comes before what was dragged along, and what cannot run before what may only be slow.
"""

from __future__ import annotations

from collections.abc import Callable

from drumline.watch.facts import Picture
from drumline.watch.verdicts.collectives import judge_mismatch
from drumline.watch.verdicts.ended import judge_ended, judge_lost_peers
from drumline.watch.verdicts.left import judge_left, judge_teardown
from drumline.watch.verdicts.reach import judge_late, judge_reach, judge_unheard
from drumline.watch.verdicts.scene import Scene
from drumline.watch.verdicts.standing import judge_standing, judge_unknown
from drumline.watch.verdicts.stopped import judge_debugged, judge_stopped
from drumline.watch.verdicts.verdict import Verdict

_ORDER: tuple[Callable[[Scene], Verdict | None], ...] = (
    judge_ended,
    judge_stopped,
    judge_reach,
    judge_left,
    judge_mismatch,
    judge_unheard,
    judge_lost_peers,
    judge_debugged,
    judge_late,
    judge_teardown,
    judge_standing,
    judge_unknown,
)


def judge(picture: Picture) -> Verdict | None:
    """The likeliest cause; None when there is nobody to say anything of."""
    scene = Scene(picture)
    return next((verdict for look in _ORDER if (verdict := look(scene)) is not None), None)
