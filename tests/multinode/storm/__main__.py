"""Many faults in one unattended launch: does it recover each time, and how much time is spent
training?

    python -m tests.multinode.storm --minutes 30 --every-s 40 --seed 0          (make soak-storm)

One fault every 40 s, each kind in its turn, in an order that the seed decides: a rank is killed
(`kill`), stopped (`stop`) or exits with 0 in the middle of a step (`exit`); a sidecar or an agent
is killed; a host is cut off for 5, 10 or 16 s (`cut_5`, ...), or is off for a while and a spare
takes its place (`power_off`). It prints a table in Markdown, and compares the bits with a run
without faults.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.multinode import needs, processes
from tests.multinode.job import Job, end
from tests.multinode.storm.bed import StormBed
from tests.multinode.storm.strikes import Strike, Timeline, effective_time, judge, table
from tests.schedules import digest

CUTS_S = {"cut_5": 5.0, "cut_10": 10.0, "cut_16": 16.0}
KINDS = ("kill", "stop", *CUTS_S, "sidecar", "agent", "exit", "power_off")
# Long enough for the spare to take the place of the host.
OFF_S = 90.0
STEP_S = 0.05
SAVE_EVERY = 20
PATIENCE_S = 180.0
POLL_S = 0.05
# After a recovery, TCP's pauses become short again, and the standby processes load.
SETTLED_S = 12.0


class Storm:
    """The launch, and what happens to it."""

    def __init__(self, bed: StormBed, options: argparse.Namespace) -> None:
        self.bed = bed
        self.options = options
        self.run = bed.folder / "run"
        self.chance = random.Random(options.seed)
        self.strikes: list[Strike] = []
        self.timeline = Timeline()
        self.steps = round(options.minutes * 60 * options.expected / STEP_S)
        self.job: Job = self._launch(self.run, STEP_S)
        self.gave_up = False
        """Whether the launch neither ended nor trained, and was killed."""
        self._mends: list[tuple[float, str, str]] = []
        """When, what and where something is to be repaired."""
        self._turn: list[str] = []
        self._trains_since = float("inf")

    def _launch(self, run: Path, step_s: float) -> Job:
        return self.bed.launch(run, steps=self.steps, every=SAVE_EVERY, step_s=step_s)

    def blow(self) -> None:
        """Until the run has ended, one way or another."""
        processes.wait_until(self._has_begun, "steps", timeout_s=PATIENCE_S)
        due = time.monotonic()
        give_up_at = time.monotonic() + 2 * 60 * self.options.minutes + PATIENCE_S
        while self.job.is_running():
            self.timeline.note(self.job.log)
            self._mend()
            if time.monotonic() >= due and self._trains():
                self._strike(self._next_kind())
                due += self.options.every_s
                self._trains_since = float("inf")
            if time.monotonic() > give_up_at:
                self.gave_up = True
                end(self.job.entry)
            time.sleep(POLL_S)
        self.timeline.note(self.job.log)
        self._mend(at_once=True)

    def _has_begun(self) -> bool:
        return len(self.bed.steps(self.run)) >= SAVE_EVERY or not self.job.is_running()

    def _next_kind(self) -> str:
        if not self._turn:
            self._turn = self.chance.sample(self.options.faults, len(self.options.faults))
        return self._turn.pop()

    def _trains(self) -> bool:
        """Whether it has trained for a while: a fault while the one before is still being recovered
        from is not what is counted here."""
        last = self.bed.last_step(self.run)
        if last is None or time.time() - last.time > 1:
            self._trains_since = float("inf")
            return False
        self._trains_since = min(self._trains_since, time.monotonic())
        return (
            time.monotonic() - self._trains_since > SETTLED_S
            and self.steps - last.step > 2 * SAVE_EVERY
        )

    def _strike(self, kind: str) -> None:
        busy = self._busy()
        host = self.bed.bed[busy[-1] if kind == "exit" else self.chance.choice(busy)]
        strike = Strike(kind, host.name, time.time(), self.job.log.stat().st_size)
        if kind in ("kill", "stop"):
            strike.rank = self.bed.kill_rank(
                host, signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            )
        elif kind in CUTS_S:
            host.cut()
            self._mends.append((time.monotonic() + CUTS_S[kind], "cut", host.name))
        elif kind == "sidecar":
            self.bed.kill_sidecar(host)
        elif kind == "agent":
            self.bed.kill_agent(host)
        elif kind == "exit":
            strike.rank = max(self.bed.ranks(host))
            self.bed.leave.touch()
        else:
            self._mend(at_once=True)  # the host that was off before is the spare
            host.cut()  # first: the kernel of a host without power closes no connection
            host.power_off()
            self._mends.append((time.monotonic() + OFF_S, "power_off", host.name))
        self.strikes.append(strike)
        print(f"{len(self.strikes)}: {kind} on {host.name}", flush=True)

    def _busy(self) -> list[str]:
        """Hosts with ranks, in the order of their ranks."""
        off = {name for _, kind, name in self._mends if kind == "power_off"}
        hosts = [host for host in self.bed.bed if host.name not in off]
        first_ranks = {host.name: min(self.bed.ranks(host), default=None) for host in hosts}
        names = [name for name, rank in first_ranks.items() if rank is not None]
        return sorted(names, key=lambda name: first_ranks[name] or 0)

    def _mend(self, *, at_once: bool = False) -> None:
        for mend in list(self._mends):
            due, kind, name = mend
            if at_once or time.monotonic() >= due:
                self._mends.remove(mend)
                host = self.bed.bed[name]
                if kind == "cut":
                    host.restore()
                else:
                    self.bed.power_on(host)

    def has_right_bits(self) -> bool:
        calm = self.bed.folder / "calm"
        calm_s = PATIENCE_S + self.steps * STEP_S
        assert self._launch(calm, 0.0).wait(timeout_s=calm_s) == 0, "the run without faults"
        return digest(self.run, with_rng=True) == digest(calm, with_rng=True)


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; there are {', '.join(KINDS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.multinode.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=40.0, help="between two faults [40]")
    parser.add_argument("--procs", type=int, default=1, help="ranks of each host [1]")
    parser.add_argument("--faults", type=_kinds, default=KINDS, help=f"of {', '.join(KINDS)} [all]")
    parser.add_argument(
        "--expected", type=float, default=0.7, help="part of the time that trains [0.7]"
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    options = parser.parse_args()
    if reason := needs.missing():
        print(reason)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="drumline-storm-"))
    bed = StormBed(folder, procs=options.procs)
    with bed.bed:
        storm = Storm(bed, options)
        storm.blow()
        code = storm.job.wait()
        steps = bed.steps(storm.run)
        judge(storm.strikes, bed.folder, steps, storm.job.log.read_bytes(), storm.timeline)
        print(f"folder {folder}")
        for strike in storm.strikes:
            print(strike)
        print(table(storm.strikes, steps))
        ended = "given up" if storm.gave_up else f"exit code {code}"
        print(f"{ended}; effective time {effective_time(steps):.1%}", flush=True)
        has_right_bits = code == 0 and storm.has_right_bits()
        print(f"bits of a run without faults: {'the same' if has_right_bits else 'NOT the same'}")
    is_fine = has_right_bits and all(
        strike.is_right and strike.new_step_s is not None for strike in storm.strikes
    )
    if not options.keep and is_fine:
        shutil.rmtree(folder)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
