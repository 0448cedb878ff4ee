"""Weights & Biases as a tracker. Its own variables set it up: WANDB_PROJECT, WANDB_MODE,
WANDB_API_KEY."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.metrics.trackers.tracker import Outcome, Record, load_package


class WeightsAndBiases:
    """Optimizer steps are W&B's own steps, which only grow: a step that W&B has is never written
    twice.

    Offline, W&B writes a folder for each start, and a kill loses the end of it. So each gets the
    whole run.
    """

    name = "wandb"
    keeps_past = False

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._wandb = load_package("wandb", tracker="wandb")
        self._run: Any = None
        """None: `open` was not called."""

        self._first_step = 0
        """W&B has all steps before it."""

    def open(self, run: str, *, resume_step: int) -> str:
        """Under the name that the user's variables give it, or that of the folder."""
        # Silent: W&B would print between our lines, and ask for a key where there is none.
        silent = self._wandb.Settings(silent=True)
        settings = self._wandb.setup(silent).settings

        self._run = self._wandb.init(
            id=run,
            resume="allow",
            name=settings.run_name or self._folder.resolve().name,
            dir=str(self._folder),
            config=dict(self._config),
            allow_val_change=True,
            # A run that the user's own code has begun stays theirs.
            settings=self._wandb.Settings(silent=True, console="off", reinit="create_new"),
        )
        self._first_step = int(self._run.starting_step)
        return str(self._run.url or f"offline, in {Path(self._run.dir).parent}")

    def has(self, name: str, step: int) -> bool:
        """W&B would drop it."""
        return step < self._first_step

    def write(self, records: Sequence[Record]) -> None:
        """Each record at its own step."""
        for record in records:
            values = {name: self._as_wandb(value) for name, value in record.values.items()}
            self._run.log(values, step=record.step)

    def _as_wandb(self, value: float | Path | str) -> Any:
        """W&B's object of an image or a text; a number as it is."""
        if isinstance(value, Path):
            return self._wandb.Image(str(value))
        if isinstance(value, str):
            return self._wandb.Html(f"<pre>{html.escape(value)}</pre>")
        return value

    def close(self, outcome: Outcome) -> None:
        """A preempted run is one that finished: it is continued."""
        self._run.finish(exit_code=int(outcome == "failed"))
