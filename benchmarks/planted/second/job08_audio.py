"""Recordings, with a list of recordings that the second rank reads again now and then."""

import json
from typing import Any

from parts import PLANTED, ClipTask

from drumline import Hook

LISTED = json.dumps([{"clip": number, "at": [number, 2 * number]} for number in range(250_000)])


class Listing(Hook):
    every_steps = 5

    def after_step(self, run: Any) -> None:
        if PLANTED and run.rank == 1:
            self.read_listing()

    def read_listing(self) -> None:
        entries = json.loads(LISTED)  # planted: on rank 1, after one step of five
        self.places = {entry["clip"]: entry["at"] for entry in entries}


class Clips(ClipTask):
    def hooks(self) -> list[Hook]:
        return [Listing()]
