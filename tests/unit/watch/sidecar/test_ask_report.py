"""The flight recorder of real ranks, asked for from outside while one of them waits for the
other."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.rank.watched.watched_rank import torch_report
from drumline.watch.cluster_state import Collective
from drumline.watch.self_report import NUM_COLLECTIVES, latest_collectives, write_report
from drumline.watch.sidecar.rank_process import SelfReport, ask_report
from tests.ranks import run_ranks


def wait_in_a_collective(folder: Path) -> dict[str, Any]:
    """Rank 0 asks rank 1, which waits for it in the third all_reduce, and comes when it has the
    answer."""
    import torch
    from torch import distributed

    answer: dict[str, Any] = {"before": torch_report()}
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.mkfifo(folder / "rank-00001.ask")
        threading.Thread(target=answer_when_it_waits, args=(folder,), daemon=True).start()
    distributed.init_process_group("gloo")
    for size in (2, 3):
        distributed.all_reduce(torch.ones(size, 4))
    if rank == 0:
        answer["answers"], report = asyncio.run(ask_report(folder, 1, within_s=20))
        answer["collectives"] = report.collectives
    distributed.all_reduce(torch.ones(5))
    distributed.destroy_process_group()
    return answer


def answer_when_it_waits(folder: Path) -> None:
    with (folder / "rank-00001.ask").open("rb+", buffering=0) as fifo:
        number = fifo.read(1)[0]
    while len(torch_report().get("collectives", [])) < 3:
        time.sleep(0.01)
    write_report(folder, 1, number, torch_report)


@pytest.mark.slow
def test_the_latest_collectives_of_a_rank_that_waits(tmp_path: Path) -> None:
    answer = run_ranks(2, wait_in_a_collective, tmp_path)[0]
    assert answer["before"] == {"workers": []}, "there was no group yet"
    assert answer["answers"] is True
    assert answer["collectives"] == (
        Collective(group="default_pg", number=1, op="all_reduce", sizes=((2, 4),), is_done=True),
        Collective(group="default_pg", number=2, op="all_reduce", sizes=((3, 4),), is_done=True),
        Collective(group="default_pg", number=3, op="all_reduce", sizes=((5,),), is_done=False),
    )


def entry(
    number: int, name: str, group: tuple[str, str], *, state: str, retired: bool
) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": list(group),
        "input_sizes": [[3, 4]],
        "is_p2p": False,
        "state": state,
        "retired": retired,
        "time_created_ns": number,
    }


def test_groups_and_backends_are_distinguished() -> None:
    """As NCCL and gloo record them; run on a device with torch 2.11, and here with 2.13."""
    default = ("0", "default_pg")
    unnamed_group = ("1", "undefined")
    entries = [
        entry(n, "nccl:all_reduce", default, state="completed", retired=False) for n in range(1, 40)
    ]
    entries += [
        entry(40, "nccl:broadcast", default, state="started", retired=False),
        entry(41, "gloo:all_reduce", default, state="scheduled", retired=True),
        entry(42, "gloo:barrier", unnamed_group, state="scheduled", retired=False),
        entry(43, "nccl:_all_gather_base", unnamed_group, state="scheduled", retired=False),
        entry(44, "nccl:_reduce_scatter_base", unnamed_group, state="scheduled", retired=False),
        {**entry(45, "nccl:send", unnamed_group, state="scheduled", retired=False), "is_p2p": True},
    ]
    records = latest_collectives(reversed(entries))
    assert [record["number"] for record in records] == [*range(41 - NUM_COLLECTIVES, 45)]
    assert [(record["group"], record["op"], record["is_done"]) for record in records[-6:]] == [
        ("default_pg of nccl", "all_reduce", True),
        ("default_pg of nccl", "broadcast", False),
        ("default_pg of gloo", "all_reduce", True),
        ("1 of gloo", "barrier", False),
        ("1 of nccl", "all_gather", False),
        ("1 of nccl", "reduce_scatter", False),
    ]


def test_who_cannot_be_asked_and_who_does_not_answer(tmp_path: Path) -> None:
    assert asyncio.run(ask_report(tmp_path, 3)) == (None, SelfReport()), (
        "there is nothing to ask through"
    )
    fifo = tmp_path / "rank-00003.ask"
    os.mkfifo(fifo)
    assert asyncio.run(ask_report(tmp_path, 3)) == (None, SelfReport()), "nobody reads"
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        (tmp_path / "rank-00003.report.json").write_text(
            '{"number": 255, "calls": [], "workers": [], "collectives": []}'
        )
        assert asyncio.run(ask_report(tmp_path, 3, within_s=0.02)) == (False, SelfReport()), (
            "an old answer is none"
        )
        assert os.read(reader, 9) == b"\0"
        while True:
            try:
                os.write(reader, b"\1" * 4096)
            except BlockingIOError:
                break
        assert asyncio.run(ask_report(tmp_path, 3, within_s=0.02)) == (False, SelfReport()), (
            "full of questions"
        )
        (tmp_path / "rank-00003.report.json").write_text("{")
        assert asyncio.run(ask_report(tmp_path, 3, within_s=0.02)) == (False, SelfReport()), (
            "garbage"
        )
    finally:
        os.close(reader)


def test_a_rank_answers_without_torch_and_whatever_became_of_torchs_private_parts(
    tmp_path: Path,
) -> None:
    """The thread that answers must live on, whatever is changed under it."""
    code = (
        "import sys, pathlib; from drumline.watch.self_report import write_report;"
        "from drumline.rank.watched.watched_rank import torch_report;"
        "write_report(pathlib.Path(sys.argv[1]), 3, 7, torch_report);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    path = tmp_path / "rank-00003.report.json"
    record = json.loads(path.read_text())
    assert record.pop("calls")[-1] == ["<string>", 1, "<module>"]
    assert record == {"number": 7}

    def broken() -> dict[str, Any]:
        raise TypeError("incompatible function arguments")

    write_report(tmp_path, 3, 8, broken)
    record = json.loads(path.read_text())
    assert record.pop("calls")
    assert record == {"number": 8}
