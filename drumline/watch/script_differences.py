"""How the ranks of a script differ, from their reports. Every difference is reported once, and none
ends a job: a script may differ across ranks on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from drumline.base.text import by_rank
from drumline.watch.cluster_state import ModuleReport, ScriptReport
from drumline.watch.fact_differences import described, differences
from drumline.watch.replica_differences import find_difference

# With a manual split some ranks have one batch more; a script that does not handle that hangs, and
# is diagnosed.
MAX_BATCHES_APART = 1
LABELS = {
    "arguments": "the argument {}",
    "variables": "the variable {}",
    "packages": "{}'s version",
    "script": "the code of {}",
}
"""The text for a fact, by its group."""

ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
OWN_NAMES = re.compile(
    r"(?:^|[-_.])(?:seed|port|hosts?|host[-_]?name|addr|address|ip|ifname|interface"
    r"|(?:log|out|output|tmp|temp|cache|scratch)s?(?:[-_.]?(?:dir|directory|folder|path|file|root))?"
    r"|(?:local|global|group|node|host|machine|process|worker|run|job|task)[-_.]?(?:rank|id))$"
    r"|(?:^|[-_.])(?<!per[-_.])(?:node|machine|worker|gpu|device|index|idx|shard)$|^-*(?:rank|id)$"
)  # options whose value may differ across ranks; `--lora-rank` and `--out-channels` are not among them


@dataclass(frozen=True, kw_only=True)
class ScriptDifference:
    """A difference, as a message."""

    message: str
    rank: int | None = None
    host: str = ""
    step: int = 0


class ScriptComparison:
    """Compares the reports of all ranks as they arrive."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reported: set[str] = set()
        """What was reported or compared, by a key of each."""

        self._equal_at: dict[str, int] = {}
        """The last step at which a module was the same on all ranks."""

    def update(self, reports: Mapping[int, ScriptReport]) -> list[ScriptDifference]:
        """What was found since the last call."""
        if len(reports) < max(2, self._world_size):
            return []

        everyone = [reports[rank] for rank in sorted(reports)]
        return [*self._facts(everyone), *self._loaders(everyone), *self._modules(reports)]

    def _is_new(self, key: str) -> bool:
        """Whether this was not reported yet; from now on it is."""
        is_new = key not in self._reported
        self._reported.add(key)
        return is_new

    def _facts(self, everyone: list[ScriptReport]) -> Iterator[ScriptDifference]:
        """Arguments, variables, packages and code that differ; compared once."""
        if not all(report.facts for report in everyone) or not self._is_new("facts"):
            return

        hosts = [report.host for report in everyone]
        reported = []
        for difference in differences([report.facts for report in everyone]):
            values = list(map(str, difference.values))
            if difference.group == "arguments" and is_own_value(difference.name, values, hosts):
                continue

            name = LABELS[difference.group].format(difference.name)
            values = _without_hashes(difference.values)
            reported.append(replace(difference, name=name, values=values))

        if reported:
            text, next_step = described(reported, hosts)
            yield ScriptDifference(message=f"warning: {text}. Try: {next_step}")

    def _loaders(self, everyone: list[ScriptReport]) -> Iterator[ScriptDifference]:
        """DataLoaders with different numbers of samples or batches."""
        hosts = [report.host for report in everyone]
        for place in everyone[0].loaders:
            loaders = [report.loaders[place] for report in everyone if place in report.loaders]
            if len(loaders) < len(everyone):
                continue  # only rank 0 may evaluate

            values = [loader.samples for loader in loaders]
            what = "the length of the dataset"
            if not _are_apart(values, by_more_than=0):
                values = [loader.batches for loader in loaders]
                what = "the number of batches"
                if not _are_apart(values, by_more_than=MAX_BATCHES_APART):
                    continue

            if self._is_new(f"loader {place}"):
                yield ScriptDifference(
                    message=f"warning: ranks differ in {what} of the DataLoader at {place}: "
                    f"{by_rank(values, hosts)}. Try: give every rank the same dataset, and let a "
                    "DistributedSampler split it: ranks with more batches wait for the others, or samples are lost"
                )

    def _modules(self, reports: Mapping[int, ScriptReport]) -> Iterator[ScriptDifference]:
        """DDP modules whose parameters differ at the same step."""
        keys = dict.fromkeys(
            (key, module.ranks)
            for report in reports.values()
            for key, module in report.modules.items()
        )

        for key, ranks in keys:
            modules = {
                rank: reports[rank].modules[key]
                for rank in ranks
                if rank in reports and key in reports[rank].modules
            }
            if key in self._reported or len(modules) < len(ranks):
                continue

            steps = set.intersection(*(set(module.hashes) for module in modules.values()))
            for step in sorted(steps):
                tensors = [module.hashes[step].tensors for module in modules.values()]
                if any(replica != tensors[0] for replica in tensors):
                    self._reported.add(key)
                    yield self._module_difference(key, step, modules, reports)
                    break

                self._equal_at[key] = step

    def _module_difference(
        self,
        key: str,
        step: int,
        modules: Mapping[int, ModuleReport],
        reports: Mapping[int, ScriptReport],
    ) -> ScriptDifference:
        """The message about one DDP module, with its optimizer's settings that differ."""
        ranks = sorted(modules)
        hashes = [modules[rank].hashes[step] for rank in ranks]
        hosts = [reports[rank].host for rank in ranks]

        replicas = [
            {"host": host, "tensors": state.tensors}
            for host, state in zip(hosts, hashes, strict=True)
        ]
        difference = find_difference(replicas, ranks)
        what = difference.sentence(step, self._equal_at.get(key))

        settings = []
        for name in dict.fromkeys(name for state in hashes for name in state.settings):
            values = [state.settings.get(name) for state in hashes]
            if len(set(map(str, values))) > 1:
                settings.append(f"{name}: {by_rank(values, hosts, ranks)}")
        if settings:
            what += f"; their optimizers differ in {', '.join(settings)}"

        place = difference.place(step)
        return ScriptDifference(
            message=f"warning: DDP module {modules[ranks[0]].name}: {what}. Try: look for what differs across ranks: "
            "learning rate, seed, clipping, code under `if rank`; stop the job: its replicas are no longer one model",
            rank=place.rank,
            host=place.host or "",
            step=step,
        )


def _are_apart(values: Sequence[int | None], *, by_more_than: int) -> bool:
    """Whether all are known, and two differ by so much."""
    numbers = [value for value in values if value is not None]
    return len(numbers) == len(values) and max(numbers) - min(numbers) > by_more_than


def _without_hashes(values: Sequence[Any]) -> list[Any]:
    """Hashes stand for secrets: the message only shows which ranks have the same one."""
    hashes = list(dict.fromkeys(value["hash"] for value in values if isinstance(value, Mapping)))
    return [
        f"hidden value {hashes.index(value['hash']) + 1}" if isinstance(value, Mapping) else value
        for value in values
    ]


def is_own_value(name: str, values: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether an option's values, one for each rank, differ only in who the rank is: its host or
    address. `hosts`: that of each."""
    if OWN_NAMES.search(name.lower()):
        return True

    places = []
    for value, host in zip(values, hosts, strict=True):
        names = "|".join(map(re.escape, (host, host.partition(".")[0])))
        without_host = re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", "#", value)
        place = ADDRESS.sub("#", without_host)

        # The same file in another folder is no difference.
        places.append(PurePath(place).name if "/" in place else place)

    return len(set(places)) == 1
