"""Every socket that a command listens on, from its start to its end: at which address, and in which range of ports.

Each command runs in a network of its own, so that all that listens there is its.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.needs import missing, tool

ADDRESS, PORT = "10.9.8.1", 29500
# Starts the commands, and looks again and again who listens until all have ended.
OBSERVE = """
import json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["PYTHONPATH"])
from tests.ports import LISTENS, _text
ip, commands = sys.argv[1], json.loads(sys.argv[2])
address, ups = f"addr add {sys.argv[3]}/24 dev eth0", ("link set eth0 up", "link set eth1 up")
for words in ("link set lo up", "link add eth0 type veth peer name eth1", address, *ups):
    subprocess.run([ip, *words.split()], check=True)
pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
started = [subprocess.Popen([sys.executable, "-m", "drumline", *words], **pipes) for words in commands]
seen = set()
while any(one.poll() is None for one in started):
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == LISTENS:
                seen.add((_text(address.rpartition(":")[0]), int(address.rpartition(":")[2], 16)))
    time.sleep(0.01)
said = [one.communicate()[0] for one in started]
print(json.dumps({"seen": sorted(seen), "codes": [one.returncode for one in started], "said": said}))
"""
TASK = "train digits --model.widths 4 --train.steps 2 --train.batch_size 32 --run run --procs 2"
NODE = f"launch --nodes 2 --master {ADDRESS}:{PORT} --address {ADDRESS} --procs 1"
SMALL = "digits --model.widths 4 --train.steps 2 --train.batch_size 32 --run run"
DOCTOR = f"doctor --nodes 2 --master 127.0.0.1:{PORT} --no-collectives"
COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "train --procs": ([TASK], {"127.0.0.1"}),
    "launch --nodes": ([f"{NODE} --node-rank {rank} {SMALL}" for rank in range(2)], {ADDRESS, "127.0.0.1"}),
    "doctor --nodes": ([f"{DOCTOR} --node-rank {rank}" for rank in range(2)], {ADDRESS, "127.0.0.1"}),
    "doctor": (["doctor"], set()),
}


def observed(commands: list[str], folder: Path, network: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": network}
    environment.pop("DRUMLINE_SECRET", None)
    words = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        [tool("unshare"), "--net", sys.executable, "-c", OBSERVE, tool("ip"), words, ADDRESS],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_listens_on_all_networks(name: str, tmp_path: Path) -> None:
    commands, addresses = COMMANDS[name]
    found = observed(commands, tmp_path, "eth0" if ADDRESS in addresses else "lo")
    if name.startswith(("train", "launch")):
        assert found["codes"] == [0] * len(commands), found["said"]
        assert found["seen"], "a command that was not observed shows nothing"
    assert {address for address, _ in found["seen"]} <= addresses, found
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(port == PORT or low <= port <= high for _, port in found["seen"]), found
