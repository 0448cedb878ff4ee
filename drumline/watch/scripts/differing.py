"""In what the ranks of a script differ, from what each of them noted. Every difference is reported once.

A script may differ across ranks on purpose, so nothing here ends a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drumline.distributed.start.fact_differences import Difference, described, differences
from drumline.text import by_rank
from drumline.watch.replica_differences import find_difference
from drumline.watch.scripts.arguments import is_own
from drumline.watch.scripts.notes import ModuleNote, Note

# A hand-made split leaves some ranks one batch more; a script that does not see to that hangs, and is diagnosed.
EVEN_ENOUGH = 1


@dataclass(frozen=True, kw_only=True)
class ScriptDifference:
    """A finding."""

    sentence: str
    rank: int | None = None
    host: str = ""
    step: int = 0


class ScriptComparison:
    """Looks at the notes of all ranks as they come."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reported: set[str] = set()
        self._agreed: dict[str, int] = {}

    def look(self, notes: Mapping[int, Note]) -> list[ScriptDifference]:
        """What was found since the last look."""
        if len(notes) < max(2, self._world_size):
            return []
        everyone = [notes[rank] for rank in sorted(notes)]
        return [*self._facts(everyone), *self._loaders(everyone), *self._modules(notes)]

    def _is_new(self, what: str) -> bool:
        is_new = what not in self._reported
        self._reported.add(what)
        return is_new

    def _facts(self, everyone: list[Note]) -> Iterator[ScriptDifference]:
        if not all(note.facts for note in everyone) or not self._is_new("facts"):
            return
        found = [one for one in differences([note.facts for note in everyone]) if not _is_own(one, everyone)]
        found = [replace(one, values=_hidden(one.values)) for one in found]
        if found:
            text, next_step = described(found, _hosts(everyone))
            yield ScriptDifference(sentence=f"warning: {text}. Next: {next_step}")

    def _loaders(self, everyone: list[Note]) -> Iterator[ScriptDifference]:
        for place in everyone[0].loaders:
            of_all = [note.loaders[place] for note in everyone if place in note.loaders]
            if len(of_all) < len(everyone):
                continue  # rank 0 may well evaluate alone
            samples = [one.samples for one in of_all if one.samples is not None]
            batches = [one.batches for one in of_all if one.batches is not None]
            if len(samples) == len(everyone) and len(set(samples)) > 1:
                values, what = samples, "the length of the dataset"
            elif len(batches) == len(everyone) and max(batches) - min(batches) > EVEN_ENOUGH:
                values, what = batches, "the number of batches"
            else:
                continue
            if self._is_new(f"loader {place}"):
                yield ScriptDifference(
                    sentence=f"warning: ranks differ in {what} of the DataLoader at {place}: "
                    f"{by_rank(values, _hosts(everyone))}. Next: give every rank the same dataset, and let a "
                    "DistributedSampler split it: ranks with more batches wait for the others, or samples are lost"
                )

    def _modules(self, notes: Mapping[int, Note]) -> Iterator[ScriptDifference]:
        for key, ranks in dict.fromkeys(entry for note in notes.values() for entry in _keys(note)):
            if key not in self._reported:
                yield from self._module(key, {rank: notes[rank] for rank in ranks if rank in notes})

    def _module(self, key: str, notes: Mapping[int, Note]) -> Iterator[ScriptDifference]:
        modules = {rank: note.modules[key] for rank, note in notes.items() if key in note.modules}
        first = next(iter(modules.values()))
        if len(modules) < len(first.ranks):
            return
        for step in sorted(set.intersection(*(set(one.held) for one in modules.values()))):
            if _differ(modules, step) and self._is_new(key):
                yield self._difference(key, step, modules, notes)
            elif key not in self._reported:
                self._agreed[key] = max(step, self._agreed.get(key, 0))

    def _difference(
        self, key: str, step: int, modules: Mapping[int, ModuleNote], notes: Mapping[int, Note]
    ) -> ScriptDifference:
        ranks = sorted(modules)
        held = [modules[rank].held[step] for rank in ranks]
        hosts = [str(notes[rank].owner["host"]) for rank in ranks]
        found = find_difference(
            [
                {"host": host, "tensors": {name: list(one) for name, one in holding.tensors.items()}}
                for host, holding in zip(hosts, held, strict=True)
            ],
            ranks,
        )
        sentence = found.sentence(step, self._agreed.get(key))
        names = dict.fromkeys(name for one in held for name in one.settings)
        settings = [
            f"{name}: {by_rank(values, hosts, ranks)}"
            for name in names
            if len(set(map(str, values := [one.settings.get(name) for one in held]))) > 1
        ]
        cause = f"; their optimizers differ in {', '.join(settings)}" if settings else ""
        place = found.place(step)
        return ScriptDifference(
            sentence=f"warning: DDP module {modules[ranks[0]].name}: {sentence}{cause}. Next: look for what some ranks "
            "do otherwise: learning rate, seed, clipping, code under `if rank`; stop the job: what it trains is no "
            "longer one model",
            rank=place.rank,
            host=place.host or "",
            step=step,
        )


def _keys(note: Note) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, module in note.modules.items():
        yield key, module.ranks


def _differ(modules: Mapping[int, ModuleNote], step: int) -> bool:
    held = [module.held[step].tensors for module in modules.values()]
    return any(one != held[0] for one in held)


def _is_own(one: Difference, everyone: list[Note]) -> bool:
    return one.group == "arguments" and is_own(
        one.name.removeprefix("the argument "), list(map(str, one.values)), [note.owner for note in everyone]
    )


def _hidden(values: Sequence[Any]) -> list[Any]:
    """Without the hashes that stand for secrets: which ranks have the same one is all that is shown."""
    hashes = list(dict.fromkeys(one["hash"] for one in values if isinstance(one, Mapping)))
    return [
        f"hidden value {hashes.index(one['hash']) + 1}" if isinstance(one, Mapping) else one for one in values
    ]


def _hosts(everyone: list[Note]) -> list[str]:
    return [str(note.owner["host"]) for note in everyone]
