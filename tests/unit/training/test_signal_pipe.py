"""Signals over a pipe: heard, not acted on, put back; and those of a forked child are not taken for
the parent's."""

from __future__ import annotations

import os
import signal

from drumline.training.between_steps.preemption import SignalPipe


def test_signals_arrive_and_do_nothing_else() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    pipe = SignalPipe([signal.SIGUSR1])
    assert pipe.wait(0) == []
    for number in (signal.SIGUSR1, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert pipe.wait(5) == [signal.SIGUSR1, signal.SIGUSR1]
    pipe.wake()
    assert pipe.wait(5) == []
    pipe.close(restore=True)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_to_a_forked_child_is_the_childs_own() -> None:
    pipe = SignalPipe([signal.SIGUSR1])
    try:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
        assert pipe.wait(0) == []
    finally:
        pipe.close(restore=True)
