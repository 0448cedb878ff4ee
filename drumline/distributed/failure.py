"""Who failed first. When one rank raises, its peers soon raise too, for want of it; only the first is the cause.

The first rank to fail claims that through the store, which outlives the broken group. The others see the claim and
stay quiet, so that the user reads one traceback, and it is the right one.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict

import torch.distributed as dist

from drumline.errors import Place

FIRST = "failure/first"
COUNT = "failure/count"
CLAIM_WAIT_S = 2.0


def claim_failure(store: dist.Store | None, place: Place, error: BaseException) -> tuple[Place, str] | None:
    """Claim to be the first to fail. None: this rank is. Otherwise: where the first was, and its error in a line."""
    if store is None:
        return None
    # A lost peer shows as a communication error, and the peer's own claim may still be on its way.
    if isinstance(error, (dist.DistError, RuntimeError)) and (known := _wait_for_claim(store)):
        return known
    with contextlib.suppress(dist.DistError, RuntimeError):
        if store.add(COUNT, 1) == 1:
            store.set(FIRST, json.dumps({"place": asdict(place), "error": summary(error)}))
            return None
        return _wait_for_claim(store)
    return None


def summary(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _wait_for_claim(store: dist.Store) -> tuple[Place, str] | None:
    deadline = time.monotonic() + CLAIM_WAIT_S
    with contextlib.suppress(dist.DistError, RuntimeError):
        while time.monotonic() < deadline:
            if store.check([FIRST]):
                claim = json.loads(store.get(FIRST))
                return Place(**claim["place"]), claim["error"]
            time.sleep(0.02)
    return None
