"""Jobs with a planted bottleneck, as `cases.json` in their folder lists them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

NEAR_LINES = 3
"""An advice names the user's line if it is this close to a planted one."""


@dataclass(frozen=True, kw_only=True)
class PlantedCase:
    name: str
    bottleneck: str
    """Two jobs share a bottleneck. Empty: the job is healthy."""

    job: str
    """FILE.py:CLASS for a task, FILE.py for a script."""

    planted: str
    where: list[str] = field(default_factory=list)
    """FILE.py:LINE of each planted line."""

    names: list[str] = field(default_factory=list)
    """Regular expressions: the first advice names the bottleneck if one of them matches."""

    harmful: list[str] = field(default_factory=list)
    """Regular expressions of advice that makes this job slower, or trains something else."""

    devices: list[str] = field(default_factory=lambda: ["cpu"])
    ratio: dict[str, float] = field(default_factory=dict)
    """By device: the time of a step, divided by that without the plant."""

    @property
    def is_healthy(self) -> bool:
        return not self.bottleneck

    @property
    def is_task(self) -> bool:
        return ":" in self.job

    def is_named_by(self, advice: str) -> bool:
        if any(self._is_planted_line(*line) for line in re.findall(r"(\w+\.py):(\d+)", advice)):
            return True
        words = re.sub(r"\S*\w+\.py\b", "", advice)  # a file's name is not an explanation
        return any(re.search(pattern, words, re.IGNORECASE) for pattern in self.names)

    def is_harmed_by(self, advice: str) -> bool:
        return any(re.search(pattern, advice, re.IGNORECASE) for pattern in self.harmful)

    def _is_planted_line(self, file: str, line: str) -> bool:
        planted = [place.split(":") for place in self.where]
        return any(
            file == planted_file and abs(int(line) - int(planted_line)) <= NEAR_LINES
            for planted_file, planted_line in planted
        )


def read_cases(folder: Path) -> list[PlantedCase]:
    return [PlantedCase(**entry) for entry in json.loads((folder / "cases.json").read_text())]


def write_cases(folder: Path, cases: list[PlantedCase]) -> None:
    entries = [asdict(case) for case in cases]
    (folder / "cases.json").write_text(json.dumps(entries, indent=1) + "\n")


def select(cases: list[PlantedCase], names: list[str], device: str) -> list[PlantedCase]:
    """Cases for a device; of these, with names, only those whose name contains one."""
    on_device = [case for case in cases if device in case.devices]
    if not names:
        return on_device
    return [case for case in on_device if any(name in case.name for name in names)]
