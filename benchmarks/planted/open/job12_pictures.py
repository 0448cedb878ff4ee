"""Pictures, with a thread that counts words while the network trains."""

import threading
from typing import Any

from parts import PLANTED, PictureTask

from drumline import Hook

TEXT = "a rank counts the words of a text while the other ranks train " * 50


class WordCount(Hook):
    def start(self, run: Any) -> None:
        if PLANTED:
            threading.Thread(target=self.count, name="words", daemon=True).start()

    def count(self) -> None:
        counts: dict[str, int] = {}
        while True:
            for word in TEXT.split():  # planted: computes in Python all the time
                counts[word] = counts.get(word, 0) + 1  # planted


class Pictures(PictureTask):
    def hooks(self) -> list[Hook]:
        return [WordCount()]
