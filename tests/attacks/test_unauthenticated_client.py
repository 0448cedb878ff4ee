"""An unauthenticated client reaches the nodes' store: it runs no code, forges nothing, and the job
ends normally."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.base.errors import ExitCode
from drumline.launch.node.membership import FORM
from drumline.launch.node_plan import RUN_ID
from tests.ports import listening_addresses
from tests.ranks import free_port

SECRET = "a secret of more than sixteen letters"
STAY = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"rank-{os.environ['RANK']}-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
"""
LIMIT_S = 60.0
STATE = "drumline/membership/round"
# The first is where torch has it, and would unpickle it.
KEYS = [
    f"torch.rendezvous.{RUN_ID}",
    STATE,
    "drumline/membership/members",
    "drumline/membership/node/0",
]


class Touch:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class TwoNodes:
    """`drumline launch` twice on the loopback; their ranks stay until they are let go."""

    def __init__(self, folder: Path, secret: str | None, *, port: int | None = None) -> None:
        self.folder = folder
        self.secret = secret
        self.port = port or free_port()
        # Without a secret a client can only report, in the name of a node, that the job is over.
        self.keys = KEYS if secret is None else [*KEYS, "drumline/membership/failed"]
        (folder / "stay.py").write_text(STAY)
        environment = {
            name: value for name, value in os.environ.items() if name != "DRUMLINE_SECRET"
        }
        if secret is not None:
            environment["DRUMLINE_SECRET"] = secret
        launch = f"-m drumline launch --nodes 2 --master 127.0.0.1:{self.port} --procs 1".split()
        self.nodes = [
            subprocess.Popen(
                [
                    sys.executable,
                    *launch,
                    "--node-rank",
                    str(rank),
                    str(folder / "stay.py"),
                    str(folder),
                ],
                env={**environment, "PYTHONPATH": str(Path.cwd())},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, names
            assert all(node.poll() is None for node in self.nodes), [
                node.communicate() for node in self.nodes
            ]
            time.sleep(0.05)

    def end(self) -> list[tuple[int, str]]:
        (self.folder / "go").touch()
        outputs = [node.communicate(timeout=LIMIT_S)[0] for node in self.nodes]
        return [(node.returncode, text) for node, text in zip(self.nodes, outputs, strict=True)]


@pytest.fixture(params=[SECRET, None], ids=["with a secret", "without"])
def two_nodes(request: pytest.FixtureRequest, tmp_path: Path, warm: None) -> Iterator[TwoNodes]:
    job = TwoNodes(tmp_path, request.param)
    yield job
    for node in job.nodes:
        node.kill()
        node.communicate()


def test_no_code_of_an_unauthenticated_client_runs(two_nodes: TwoNodes, tmp_path: Path) -> None:
    two_nodes.wait_for("rank-0-0", "rank-1-0")
    listened_on = listening_addresses(two_nodes.port)
    client = dist.TCPStore(
        "127.0.0.1", two_nodes.port, is_master=False, timeout=timedelta(seconds=5)
    )
    bomb = base64.b64encode(pickle.dumps(Touch(tmp_path / "got-in")))
    for key in two_nodes.keys:
        client.set(key, bomb)  # type: ignore[arg-type]
    # The nodes have looked at it when they have put back what they know.
    deadline = time.monotonic() + LIMIT_S
    while client.get(STATE) == bomb and not (tmp_path / "got-in").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    codes = two_nodes.end()
    assert not (tmp_path / "got-in").exists()
    assert [code for code, _ in codes] == [0, 0], codes
    assert not list(tmp_path.glob("rank-*-1")), "no rank was started again"
    assert listened_on == {"127.0.0.1"}
    told = "DRUMLINE_SECRET is not set: whoever reaches" in codes[0][1]
    assert told == (two_nodes.secret is None)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
def test_who_listens_first_in_place_of_node_0_runs_nothing(
    secret: str | None, tmp_path: Path, warm: None
) -> None:
    """Without a secret they can pass for node 0, and keep the others waiting."""
    client = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bomb = base64.b64encode(pickle.dumps(Touch(tmp_path / "got-in")))
    job = {"job": "", "num_nodes": 2, "nonce": "0" * 32, "form": FORM}
    for key, value in {
        **dict.fromkeys(KEYS, bomb),
        "drumline/membership/job": json.dumps(job),
    }.items():
        client.set(key, value)  # type: ignore[arg-type]
    nodes = TwoNodes(tmp_path, secret, port=client.port).nodes
    try:
        first, _ = nodes[0].communicate(timeout=LIMIT_S)
        if secret is None:
            deadline = time.monotonic() + LIMIT_S
            while b"1" not in client.get("drumline/membership/members").split():
                assert nodes[1].poll() is None, nodes[1].communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(2)  # it polls the list of the round
            nodes[1].terminate()
        second, _ = nodes[1].communicate(timeout=LIMIT_S)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert not (tmp_path / "got-in").exists()
    assert nodes[0].returncode == ExitCode.PREFLIGHT_FAILED
    assert f"the rendezvous port {client.port} of {socket.gethostname()} is in use" in first
    if secret is not None:
        assert nodes[1].returncode == ExitCode.PREFLIGHT_FAILED
        assert (
            f"what listens at 127.0.0.1:{client.port} is not the launcher of node 0 of this "
            "job: its DRUMLINE_SECRET differs" in second
        )
