"""The start of a run with a mirror, where a rank is lost while rank 0 downloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.runs.run_folder import RunFolder
from drumline.training.between_steps import mirroring
from tests.store_server import Bucket, Proxy, use_endpoint


@pytest.fixture(name="gate")
def make_gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_rank_0_that_has_lost_another_does_not_wait_for_its_download(
    bucket: Bucket, gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(value: Any) -> Any:
        raise ConnectionError("rank 1 is lost")

    monkeypatch.setattr(mirroring, "POLL_S", 0.2)
    monkeypatch.setattr(mirroring, "broadcast_json", lost)
    request: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(mirror=bucket.url))
    )
    ddp: Any = SimpleNamespace(is_main_process=lambda: True, device=torch.device("cpu"))
    with Proxy(bucket.server, lambda method, path: gate.wait(60) and None) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        with pytest.raises(ConnectionError, match="rank 1 is lost"):
            mirroring.restore_from_mirror(request, RunFolder(tmp_path), ddp)
        assert not gate.is_set()
        gate.set()
