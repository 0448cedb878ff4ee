"""A notice that the machine will be taken back (`--watch.notice`): the run saves and leaves, as after a signal.

On each node one rank looks, in a thread of its own: training neither waits for it nor fails with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from drumline.engine.preemption import Preemption
from drumline.launch.spot_notice import Probe, make_probe
from drumline.log import log
from drumline.manager import DDPManager


@contextmanager
def looking_for_notice(notice: str | None, ddp: DDPManager, preemption: Preemption) -> Iterator[None]:
    """Look while the block runs. A function of the user's is loaded here: that it is not there is an error at once."""
    if notice is None or ddp.get_local_rank() != 0:
        yield
        return
    probe, every_s = make_probe(notice)
    ended = threading.Event()
    # A daemon, and not waited for: the user's function may never return.
    threading.Thread(
        target=_look,
        args=(probe, every_s, notice, preemption, ended),
        name="drumline-notice",
        daemon=True,
    ).start()
    try:
        yield
    finally:
        ended.set()


def _look(probe: Probe, every_s: float, notice: str, preemption: Preemption, ended: threading.Event) -> None:
    has_warned = False
    while not ended.is_set():
        try:
            words = probe()
        except Exception as error:
            if not has_warned:
                log.warning(
                    f"watch.notice {notice} failed: {type(error).__name__}: {error}; it is asked again every "
                    f"{every_s:g} s, and this is not said again"
                )
            words, has_warned = None, True
        if words and not ended.is_set():
            preemption.tell(words)
            return
        ended.wait(every_s)
