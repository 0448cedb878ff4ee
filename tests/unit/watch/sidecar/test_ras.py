"""NCCL's RAS as a witness: its protocol, whose communicators count, what is written, and that
nothing waits for it.

The documents have the form of NCCL's src/ras/client_support.cc; `tests/data/nccl/ras-*.json` were
made on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from drumline.watch.cluster_state import RasRank
from drumline.watch.diagnosis.diagnosis_files import ras_remarks
from drumline.watch.sidecar.system_evidence import (
    HANDSHAKE_S,
    RAS_LIMIT_S,
    RAS_REQUEST,
    ask_ras,
    loopback_places,
    ras_ranks,
)

PIDS = {0: 100, 1: 101}
HELLO = b"SERVER PROTOCOL 2\n"


def member(
    rank: int, *, pid: int | None = None, all_reduces: int = 7, sends: int = 0, **status: Any
) -> dict[str, Any]:
    healthy = {
        "init_state": 0,
        "async_error": 0,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    return {
        "rank": rank,
        "host": "127.0.0.1",
        "pid": 100 + rank if pid is None else pid,
        "cuda_dev": 0,
        "nvml_dev": 0,
        "status": {**healthy, **status},
        "collective_counts": {"Broadcast": 1, "AllReduce": all_reduces, "Send": sends},
    }


def missing(rank: int, *, unresponsive: bool = True) -> dict[str, Any]:
    entry = {**member(rank), "status": {"unresponsive": unresponsive, "considered_dead": False}}
    del entry["collective_counts"]
    return entry


def document(*communicators: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> bytes:
    ranks = [
        {"size": len(here) + len(missing), "ranks": here, "missing_ranks": missing}
        for here, missing in communicators
    ]
    return json.dumps({"nccl_version": "2.28.9", "communicators": ranks}, indent=2).encode()


@contextlib.asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A port of this machine that sends these parts to every client, and the requests that it got;
    without parts it accepts connections and never answers."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            requests.append(await reader.read(1000))
            for part in parts:
                writer.write(part)
                await writer.drain()
            if not parts:
                await reader.read()
        done.append(1)

    done: list[int] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()
        while len(done) < len(requests):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)


def ask(*parts: bytes) -> tuple[tuple[RasRank, ...], list[bytes]]:
    async def main() -> tuple[tuple[RasRank, ...], list[bytes]]:
        async with answering(*parts) as (address, asked):
            return await ask_ras(address, PIDS, 2), asked

    return asyncio.run(main())


def test_it_is_asked_by_its_protocol_and_its_answer_read() -> None:
    ranks, requests = ask(HELLO, b"OK\nOK\n", document(([member(0), member(1, all_reduces=6)], [])))
    assert requests == [b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nSTATUS\n"]
    assert ranks == (RasRank(rank=0, num_collectives=8), RasRank(rank=1, num_collectives=7))


@pytest.mark.parametrize(
    "parts",
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n",),
        (b"",),
        (HELLO, b"OK\nERROR: Unknown command SET FORMAT json\n", b"Job summary\n"),
        (HELLO, b"OK\nOK\n", b"{"),
        (HELLO, b"OK\nOK\n", b'{"communicators": [{"size": 2}]}'),
        (HELLO, b"OK\nOK\n", b'{"communicators": [1]}'),
        (HELLO, b"OK\nOK\n", b"[" * 100_000),
        (b"x" * 200_000,),
    ],
)
def test_another_answer_is_no_evidence(parts: tuple[bytes, ...]) -> None:
    assert ask(*parts)[0] == ()


def test_who_never_answers_is_given_up_and_asked_again_meanwhile() -> None:
    begun = time.monotonic()
    ranks, requests = ask()
    assert ranks == ()
    assert RAS_LIMIT_S <= time.monotonic() - begun < 4 * RAS_LIMIT_S
    assert len(requests) > 1, "the port has several processes behind it, and one may be stopped"


def test_there_is_time_for_the_answer_that_ras_sends_when_a_peer_is_silent() -> None:
    (timeout,) = re.findall(rb"TIMEOUT (\d+)\n", RAS_REQUEST)
    assert int(timeout) + 2 * HANDSHAKE_S < RAS_LIMIT_S, "a stopped process may be asked first"


def test_where_nothing_listens_there_is_no_evidence() -> None:
    async def main() -> tuple[RasRank, ...]:
        async with answering() as (address, _):
            pass
        return await ask_ras(address, PIDS, 2)

    assert asyncio.run(main()) == ()


def test_only_the_loopback_is_asked() -> None:
    assert loopback_places("localhost:28028") == [("127.0.0.1", 28028), ("::1", 28028)]
    assert loopback_places("127.0.0.2:5") == [("127.0.0.2", 5)]
    assert loopback_places("[::1]:5") == [("::1", 5)]
    assert (
        loopback_places("127.0.0.1") == loopback_places("127.0.0.1:0") == loopback_places("") == []
    )
    assert (
        loopback_places("10.0.0.1:28028")
        == loopback_places("gpu-02:28028")
        == loopback_places("0.0.0.0:5")
        == []
    )


def test_communicators_of_other_jobs_and_of_a_part_of_the_ranks_do_not_count() -> None:
    other_job = ([member(0, pid=900), member(1, pid=901)], [])
    part = ([member(0, all_reduces=3)], [])
    assert ras_ranks(document(other_job, part), PIDS, 2) == ()
    ranks = ras_ranks(document(other_job, ([member(0), member(1, sends=9)], []), part), PIDS, 2)
    assert [rank.num_collectives for rank in ranks] == [8, 8]


def test_the_answer_of_nccl_2_28_lacks_a_comma_and_is_read() -> None:
    text = document(([member(0)], [missing(1)])).decode()
    head, tail = text.rsplit('"nvml_dev": 0,', 1)
    without = f'{head}"nvml_dev": 0{tail}'.encode()
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(without)
    assert ras_ranks(without, PIDS, 2)[1] == RasRank(rank=1, answers=False, is_member=False)


@pytest.mark.parametrize(
    ("ranks", "remarks"),
    [
        (
            ([member(0), member(1)], []),
            ["all 2 ranks have begun the same 8 collectives, none has an error"],
        ),
        (([member(0), member(1, all_reduces=6)], []), ["collectives begun: rank 1: 7; rank 0: 8"]),
        (([member(0)], [missing(1)]), ["no answer from rank 1"]),
        (([member(0)], [missing(1, unresponsive=False)]), ["not in the communicator: rank 1"]),
        (([member(0, async_error=6), member(1)], []), ["remote error on rank 0"]),
        (([member(0, init_state=7), member(1, abort_flag=True)], []), ["aborted by rank 1"]),
    ],
)
def test_what_the_diagnosis_file_says(ranks: Any, remarks: list[str]) -> None:
    assert list(ras_remarks(ras_ranks(document(ranks), PIDS, 2))) == remarks


def test_without_an_answer_it_says_nothing() -> None:
    assert list(ras_remarks(())) == []


def test_recorded_answers_are_read() -> None:
    """Of two ranks on a GPU, by tests/gpu/test_nccl_logs.py."""
    for name, unanswered in (("ras-healthy.json", []), ("ras-stopped.json", [1])):
        text = (Path(__file__).parents[3] / "data" / "nccl" / name).read_bytes()
        pids = {0: int(re.findall(rb'"rank": 0,\s*"host": "\S*",\s*"pid": (\d+)', text)[0])}
        ranks = ras_ranks(text, pids, 2)
        assert [rank.rank for rank in ranks] == [0, 1]
        assert [rank.rank for rank in ranks if not rank.answers] == unanswered
        assert ranks[0].num_collectives > 0
