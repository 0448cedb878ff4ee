"""Stand-in until the lead's own is merged: a rank's beat, made where its launcher said."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from drumline.launch.topology import topology_from
from drumline.launch.watch_terms import watch_terms_from
from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import BeatWriter


class Attendance:
    """A rank under the watch, as long as it is open."""

    def __init__(self, beat: BeatWriter) -> None:
        self.beat = beat

    @classmethod
    def of_script(cls, environment: Mapping[str, str]) -> Self:
        """For a script that knows nothing of it."""
        terms, topology = watch_terms_from(environment), topology_from(environment)
        if terms.folder is None or topology is None:
            return cls(BeatWriter())
        return cls(BeatWriter(terms.folder / f"rank-{topology.rank:05d}.beat", rank=topology.rank))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.beat.mark(Phase.LEFT)
