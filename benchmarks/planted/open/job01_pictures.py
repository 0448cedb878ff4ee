"""Pictures, with a message to a slow service after every step."""

import time
from typing import Any

from parts import PLANTED, PictureTask

from drumline import Hook


class Notify(Hook):
    def after_step(self, run: Any) -> None:
        if PLANTED:
            time.sleep(0.15)  # planted: waits for the answer of a service


class Pictures(PictureTask):
    def hooks(self) -> list[Hook]:
        return [Notify()]
