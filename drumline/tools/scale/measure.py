"""`drumline scale measure`: short runs of a job on several numbers of ranks, each with a profile,
and how much faster the larger ones are. No torch.

With `--world 1,2,4` the runs are base-1, weak-2, weak-4, strong-2 and strong-4: a weak size has as
many samples on each rank as the base, a strong one as many in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

from drumline.base.text import plural
from drumline.base.untrusted import make_own_folder
from drumline.runs.profile_result import ProfileResult, read_profile
from drumline.runs.scaling_result import MeasuredSize, Measurement
from drumline.tools.profile.advice_trial import QUIET
from drumline.tools.prove.killed_run import Leg, run_to_the_end

WARM_UP = 8
"""Steps before those that are profiled: the last of them are timed without the profiler."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The flags of `scale measure`."""

    worlds: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ("weak", "strong")
    steps: int = 10

    def hosts_of(self, ranks: int) -> list[tuple[str, int]]:
        """The hosts of so many ranks, and how many each has: `[('a', 4), ('b', 4)]`; none: this
        machine."""
        used = self.hosts[:ranks]
        return [(host, ranks // len(used)) for host in used]


def wrong_worlds(options: MeasureOptions) -> Iterator[str]:
    """A message for each number of ranks that cannot be run."""
    if len(set(options.worlds)) < 2:
        yield "--world: give two numbers of ranks or more, as in 1,2,4"
    for ranks in options.worlds:
        count = len(options.hosts_of(ranks))
        if count and ranks % count:
            yield f"--world: {plural(ranks, 'rank')} cannot be split evenly over {plural(count, 'host')}"


@dataclass(frozen=True, kw_only=True)
class SizedRuns:
    """How to run the job for some steps on so many ranks."""

    arguments: Callable[[Mapping[str, Any]], Sequence[str]]
    """The task and its flags, with these settings changed."""
    options: MeasureOptions
    folder: Path
    note: Callable[[str], None]

    def profiled(self, name: str, ranks: int, batch: int | None) -> tuple[ProfileResult, Path]:
        """Run it, with another batch if one is given, and read its profile."""
        last = WARM_UP + self.options.steps
        changed = {
            **QUIET,
            "watch.replicas_every": 0,
            "train.steps": last + 1,
            "log.profile": f"{WARM_UP}:{last}",
        }
        title = plural(ranks, "rank")

        if batch is None:
            self.note(title)
        else:
            self.note(f"{title}, a batch of {batch:,}")
            changed["train.batch_size"] = batch

        run = self.folder / f"{name}-{ranks}"
        leg = Leg(
            name=f"the run on {title}",
            arguments=tuple(self.arguments(changed)),
            folder=run,
            log=self.folder / f"{name}-{ranks}.log",
            world_size=ranks,
            hosts=self.options.hosts_of(ranks),
        )

        run_to_the_end(leg)
        return read_profile(run), run


def measure(runs: SizedRuns, *, cores: int, gpus: int) -> Measurement:
    """Run all sizes. The smallest has the job's own batch; `weak` sizes have as much on each rank,
    `strong` sizes have the same batch in all.

    `cores`, `gpus`: of this machine; 0: not known."""
    made_at = time.time()
    fewest, *more_ranks = sorted(set(runs.options.worlds))
    make_own_folder(runs.folder, follow_links=True)
    base, base_run = runs.profiled("base", fewest, None)
    assert base.batch_size is not None

    sizes = []
    for scaling in runs.options.scalings:
        sizes.append(_size(scaling, base, base_run, base))
        for ranks in more_ranks:
            batch = base.batch_size
            if scaling == "weak":
                batch = batch * ranks // fewest

            profile, run = runs.profiled(scaling, ranks, batch)
            sizes.append(_size(scaling, profile, run, base))

    room = cores if base.device == "cpu" else gpus
    most = max(runs.options.worlds)
    return Measurement(
        made_at=made_at,
        task=base.task,
        device=base.device,
        shares_cores=not runs.options.hosts and most > (room or most),
        sizes=tuple(sizes),
    )


def _size(scaling: str, profile: ProfileResult, run: Path, base: ProfileResult) -> MeasuredSize:
    """One row of the measurement: this profile against that of the fewest ranks. Times that only the
    profile has are those without the profiler, in proportion."""
    assert profile.batch_size is not None
    assert base.batch_size is not None
    step_s = profile.unprofiled_step_s or profile.step_s
    base_s = base.unprofiled_step_s or base.step_s
    slower = profile.step_s / step_s  # with the profiler
    speedup = profile.batch_size / step_s / (base.batch_size / base_s)
    steps_s = [seconds for rank in profile.ranks for seconds in rank.step_s]

    return MeasuredSize(
        scaling=scaling,
        nodes=profile.num_nodes,
        ranks=profile.world_size,
        batch_size=profile.batch_size,
        step_s=step_s,
        spread_s=pstdev(steps_s) / slower,
        speedup=speedup,
        efficiency=speedup * base.world_size / profile.world_size,
        parts_s={part: seconds / slower for part, seconds in profile.parts_s.items()},
        hidden_communication_s=profile.hidden_communication_s / slower,
        run=str(run),
    )
