"""Many faults in one unattended launch: does it recover each time, and how much time is spent training?

    python -m tests.multinode.storm --minutes 13 --seed 0          (make soak-storm)

Ranks, sidecars and agents are killed, ranks stopped, links cut for 10 s, one fault every 45 s, in an order that the
seed decides. Among `--faults` may also be `exit` (a rank exits with 0 in the middle of a step) and `power_off` (a host
is off for a while, and a spare takes its place).
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.multinode import needs, processes
from tests.multinode.faults.reading import Done, Said, again, said_in
from tests.multinode.job import Job
from tests.multinode.storm.bed import StormBed
from tests.schedules import digest

# The mix of the storm that ended a job seven times, before a launch restarted what was lost: 19 faults.
FAULTS = 4 * ("kill",) + 5 * ("stop",) + 3 * ("cut",) + 3 * ("sidecar",) + 4 * ("agent",)
NAMES = (*dict.fromkeys(FAULTS), "exit", "power_off")
CUT_S = 10.0
STEP_S = 0.05
SAVE_EVERY = 20
PATIENCE_S = 180.0
CAUSES = {"kill": "killed", "stop": "stopped", "cut": "unreachable", "power_off": "unreachable", "exit": "left_early"}


@dataclass
class Strike:
    """One fault: what, where and when; and what came of it."""

    fault: str
    host: str
    rank: int | None
    at: float
    screen_from: int
    """Where the launch's screen stood."""
    is_right: bool = False
    told_s: float | None = None
    new_step_s: float | None = None
    steps_lost: int | None = None
    said: str = ""


class Storm:
    """The launch, and what happens to it."""

    def __init__(self, bed: StormBed, options: argparse.Namespace) -> None:
        self.bed, self.options = bed, options
        self.run = bed.folder / "run"
        self.chance = random.Random(options.seed)
        self.strikes: list[Strike] = []
        self.steps = round(options.minutes * 60 * options.expected / STEP_S)
        self.job: Job = self._launch(self.run, STEP_S)
        self._mends: list[tuple[float, str, str]] = []
        self._turn: list[str] = []

    def _launch(self, run: Path, step_s: float) -> Job:
        return self.bed.launch(run, steps=self.steps, every=SAVE_EVERY, step_s=step_s, restarts=1000)

    def blow(self) -> None:
        """Until the run has ended, one way or another."""
        self._wait_for_steps(start=1, count=SAVE_EVERY)
        due = time.monotonic()
        while self.job.is_running():
            self._mend()
            if time.monotonic() >= due and self._trains():
                # Each has its turn, in an order that the seed decides.
                self._turn = self._turn or self.chance.sample(self.options.faults, len(self.options.faults))
                self._strike(self._turn.pop())
                due += self.options.every_s
            time.sleep(0.05)
        self._mend(at_once=True)

    def _trains(self) -> bool:
        """A fault while the one before is still being recovered from is not what is counted here."""
        (*_, last) = self.bed.steps(self.run)
        return time.time() - last.time < 1 and self.steps - last.step > 2 * SAVE_EVERY

    def _wait_for_steps(self, *, start: int, count: int) -> None:
        def has_done() -> bool:
            done = [one for one in self.bed.steps(self.run) if one.start >= start]
            return len(done) >= count or not self.job.is_running()

        processes.wait_until(has_done, "steps", timeout_s=PATIENCE_S)

    def _strike(self, fault: str) -> None:
        host = self.bed.bed[self.chance.choice(self._busy())]
        strike = Strike(fault, host.name, None, time.time(), len(self.job.text()))
        if fault in ("kill", "stop"):
            strike.rank = self.bed.kill_rank(host, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        elif fault == "cut":
            host.cut()
            self._mends.append((time.monotonic() + CUT_S, "cut", host.name))
        elif fault == "sidecar":
            self.bed.kill_sidecar(host)
        elif fault == "agent":
            self.bed.kill_agent(host)
        elif fault == "exit":
            self.bed.leave.touch()
            strike.host = self._busy()[-1]
        elif fault == "power_off":
            host.power_off()
            self._mends.append((time.monotonic() + 0.8 * self.options.every_s, "power_off", host.name))
        self.strikes.append(strike)
        print(f"{len(self.strikes)}: {fault} on {host.name}", flush=True)

    def _busy(self) -> list[str]:
        """Hosts with ranks, in the order of their ranks."""
        found = [(min(ranks), host.name) for host in self.bed.bed if (ranks := self.bed.ranks(host))]
        return [name for _, name in sorted(found)]

    def _mend(self, *, at_once: bool = False) -> None:
        for mend in list(self._mends):
            due, fault, name = mend
            if at_once or time.monotonic() >= due:
                self._mends.remove(mend)
                host = self.bed.bed[name]
                host.restore() if fault == "cut" else self.bed.power_on(host)

    def read(self) -> None:
        """What was said of each, and when training went on."""
        said, steps, text = said_in(self.bed.folder), self.bed.steps(self.run), self.job.text()
        for number, strike in enumerate(self.strikes):
            following = self.strikes[number + 1 : number + 2]
            until = following[0].at if following else float("inf")
            mine = [one for one in said if strike.at <= one.time < until and one.word != "stall"]
            screen = text[strike.screen_from : following[0].screen_from if following else None]
            self._judge(strike, mine, screen, steps, until)

    def _judge(self, strike: Strike, said: list[Said], screen: str, steps: list[Done], until: float) -> None:
        if said:
            strike.told_s, strike.said = said[0].time - strike.at, said[0].message
        if strike.fault == "sidecar":
            strike.is_right = not said
            following = [one.time for one in steps if strike.at < one.time < until]
            strike.new_step_s = following[0] - strike.at if following else None
            strike.steps_lost = 0
            return
        if strike.fault == "agent":
            strike.said = f"the launcher's agent on {strike.host} was killed by SIGKILL"
            strike.is_right = strike.said in screen
        else:
            strike.is_right = bool(said) and said[0].cause == CAUSES[strike.fault]
            if strike.rank is not None:
                strike.is_right &= (said[0].rank, said[0].host) == (strike.rank, strike.host) if said else False
        how = again(steps, strike.at)
        if how.first_new_step is not None and how.first_new_step < until:
            strike.new_step_s, strike.steps_lost = how.first_new_step - strike.at, how.steps_lost

    def effective(self) -> float:
        """Steps kept, at the pace of an undisturbed step, over the time from the first step to the last."""
        steps = self.bed.steps(self.run)
        pace = statistics.median(
            after.time - before.time for before, after in itertools.pairwise(steps) if after.start == before.start
        )
        return (steps[-1].step - steps[0].step) * pace / (steps[-1].time - steps[0].time)

    def has_right_bits(self) -> bool:
        calm = self.bed.folder / "calm"
        assert self._launch(calm, 0.0).wait(timeout_s=PATIENCE_S) == 0, "the undisturbed run"
        return digest(self.run, with_rng=True) == digest(calm, with_rng=True)


def table(strikes: list[Strike]) -> str:
    lines = ["| fault | n | diagnosed right | recovered | new step: median, longest (s) | steps lost, most |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    names = sorted({strike.fault for strike in strikes})
    for name, some in [
        *((name, [one for one in strikes if one.fault == name]) for name in names),
        ("**all**", strikes),
    ]:
        times = [one.new_step_s for one in some if one.new_step_s is not None]
        pace = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
        lost = max((one.steps_lost or 0 for one in some), default=0)
        right = sum(one.is_right for one in some)
        lines.append(f"| {name} | {len(some)} | {right} | {len(times)} | {pace} | {lost} |")
    return "\n".join(lines)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.multinode.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=45.0, help="between two faults [45]")
    parser.add_argument("--procs", type=int, default=1, help="ranks of each host [1]")
    parser.add_argument("--faults", type=_names, default=FAULTS, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--expected", type=float, default=0.9, help="part of the time that trains [0.9]")
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
        storm.read()
        print(f"folder {folder}")
        for strike in storm.strikes:
            print(strike)
        print(table(storm.strikes))
        print(f"exit code {code}; effective time {storm.effective():.1%}", flush=True)
        same = code == 0 and storm.has_right_bits()
        print(f"bits of an undisturbed run: {'the same' if same else 'NOT the same'}")
    fine = same and all(strike.is_right and strike.new_step_s is not None for strike in storm.strikes)
    if not options.keep and fine:
        shutil.rmtree(folder)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
