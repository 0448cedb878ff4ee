"""How a command loads torch: with the garbage collector at rest, and out of its sight ever after.

Modules are some hundred thousand objects that stay to the end. The collector would look through them several times
while they come, now and then during the training, and once more at the exit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import things in here that stay to the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
