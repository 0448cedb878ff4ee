"""Point clouds, with a status of the job that is renewed in the background."""

import json
import threading
import time
from typing import Any

from parts import PLANTED, CloudTask, clouds
from torch.utils.data import Dataset

ENTRIES = {f"scan-{number}": [number, number / 7] for number in range(12_000)}
PAUSE_S = 0.03


class Status:
    """The text that a page of status would show."""

    def __init__(self) -> None:
        self.text = ""

    def keep_fresh(self) -> None:
        while True:
            self.text = json.dumps(ENTRIES)  # planted: holds the GIL until it is done
            time.sleep(PAUSE_S)


class Clouds(CloudTask):
    def train_data(self) -> Dataset[Any]:
        status = Status()
        if PLANTED:
            threading.Thread(target=status.keep_fresh, daemon=True).start()
        return clouds(4096)
