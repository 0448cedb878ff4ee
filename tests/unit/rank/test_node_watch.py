"""Before the sidecars start: which ranks make up a node, whose the watch folder is, and where a
node listens."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology, WatchSettings
from drumline.config.schema import WatchConfig
from drumline.net.interfaces import LOOPBACK, interfaces, outward_address
from drumline.rank.rendezvous.rank_rendezvous import Card, Rendezvous, group_by_node, this_machine
from drumline.rank.sealed_store import SealedStore
from drumline.rank.watched.node_watch import (
    NodeWatch,
    listen_for_sidecars,
    make_watch_folder,
    sidecar_address,
)
from drumline.watch import watch_folder


def ranks(*given: tuple[str, int]) -> dict[int, Card]:
    """`("a1", 0)`: on host a, machine 1, with local number 0."""
    return {
        rank: {"host": place[0], "machine": place[1:], "local_rank": local}
        for rank, (place, local) in enumerate(given)
    }


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        (ranks(("a1", 0)), [(0,)]),
        (ranks(("a1", 0), ("a1", 1), ("b2", 0), ("b2", 1)), [(0, 1), (2, 3)]),
        # srun may deal ranks out in turn.
        (ranks(("a1", 0), ("b2", 0), ("a1", 1), ("b2", 1)), [(0, 2), (1, 3)]),
        # The same name on two machines.
        (ranks(("a1", 0), ("a1", 1), ("a2", 0), ("a2", 1)), [(0, 1), (2, 3)]),
        # Two launchers on one machine, of different sizes.
        (ranks(("a1", 0), ("a1", 1), ("a1", 2), ("a1", 0), ("a1", 1)), [(0, 1, 2), (3, 4)]),
        # Every rank its own number 0; and no rank with number 0, or not the lowest rank.
        (ranks(("a1", 0), ("a1", 0)), [(0,), (1,)]),
        (ranks(("a1", 0), ("b1", 1)), [(0,), (1,)]),
        (ranks(("a1", 1), ("a1", 0)), [(1, 0)]),
    ],
)
def test_ranks_that_see_each_other_make_up_a_node(
    places: dict[int, Card], nodes: list[tuple[int, ...]]
) -> None:
    assert group_by_node(places) == nodes


def test_this_machine_is_identified_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(this_machine()) > 36
    assert this_machine() == this_machine()
    monkeypatch.setattr("drumline.rank.rendezvous.rank_rendezvous.BOOT", Path("/nowhere"))
    assert this_machine() == ""


def test_the_folder_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_folder = tmp_path / "given"
    for made in (make_watch_folder(given_folder), make_watch_folder(given_folder)):
        assert made == given_folder
        assert given_folder.stat().st_mode & 0o777 == 0o700
    mine = make_watch_folder(None)
    assert mine.stat().st_mode & 0o777 == 0o700
    assert mine.parent == watch_folder.MEMORY
    mine.rmdir()
    monkeypatch.setattr(watch_folder, "MEMORY", tmp_path / "not-there")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert make_watch_folder(None).parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there-either"))
    with pytest.raises(
        PreflightError, match=r"no folder for the watchdog can be made in .*: No such file"
    ) as caught:
        make_watch_folder(None)
    assert "--watch.sidecar off" in str(caught.value)


def test_a_folder_is_in_use_from_the_start_and_removed_when_the_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_folder, "MEMORY", tmp_path)
    new_node = functools.partial(NodeWatch, Topology(), WatchConfig(), run=None)
    with new_node(WatchSettings(folder=None)) as node:
        mine = Path(node.prepare()["folder"])
        watch_folder.make_memory_folder()
        assert mine.is_dir(), "another job leaves it alone"
    watch_folder.make_memory_folder()
    assert not mine.exists(), (
        "as after a rank that was killed while it waited: the next job has removed it"
    )

    alone = Rendezvous(SealedStore(dist.HashStore(), None), ((0,),), ("a",), (LOOPBACK,), ({},))
    given_folder = tmp_path / "given"
    for folder in (None, given_folder):
        with contextlib.suppress(KeyError), new_node(WatchSettings(folder=folder)) as node:
            mine = Path(node.prepare()["folder"])
            listening = node.listen(alone)
            raise KeyError
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((listening["address"], listening["port"]))
        assert mine.exists() == (folder is not None), "the launcher removes its own"


def test_a_folder_that_others_could_use_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(PreflightError) as caught:
            make_watch_folder(folder)
        assert "leave DRUMLINE_WATCH_DIR to the launcher" in str(caught.value)
        return caught.value.what.removeprefix(f"the watch folder {folder} cannot be used: ")

    open_one, link, file, theirs = (tmp_path / name for name in ("open", "link", "file", "theirs"))
    open_one.mkdir()
    open_one.chmod(0o755)
    assert refused(open_one) == "it is open to others (mode 755)"
    (tmp_path / "mine").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "mine")
    assert refused(link) == "it is a symbolic link, not a folder"
    file.touch()
    assert refused(file) == "File exists"
    assert refused(tmp_path / "a" / "b") == "No such file or directory"
    if os.geteuid() == 0:
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 12345, -1)
        assert refused(theirs) == "it belongs to user id 12345, and this is user id 0"


def test_a_listener_is_of_the_sidecar_once_its_options_have_it(tmp_path: Path) -> None:
    """Its number may be that of another file by the time a start fails."""
    alone = Rendezvous(SealedStore(dist.HashStore(), None), ((0,),), ("a",), (LOOPBACK,), ({},))
    node = NodeWatch(Topology(), WatchConfig(), WatchSettings(folder=tmp_path), run=None)
    with contextlib.suppress(KeyError), node:
        node.prepare()
        node.listen(alone)
        listener = node.options(alone).listener
        raise KeyError
    assert listener is not None
    os.close(listener)  # it is still open


def test_a_folder_that_the_first_rank_names_is_checked_by_the_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    second = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2)
    joined = Rendezvous(
        SealedStore(dist.HashStore(), None),
        ((0, 1),),
        ("a",),
        (None,),
        ({"folder": str(tmp_path)},),
    )
    node = NodeWatch(second, WatchConfig(), WatchSettings(), run=None)
    with pytest.raises(
        PreflightError, match=f"the watch folder {tmp_path} cannot be used: it is open"
    ):
        node.options(joined)
    tmp_path.chmod(0o700)
    assert node.options(joined).folder == str(tmp_path)


def test_a_node_listens_on_the_way_to_the_others_alone() -> None:
    assert outward_address({"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1") == "127.0.0.1"
    assert outward_address({"NCCL_SOCKET_IFNAME": "=lo"}, "127.0.0.1") == "127.0.0.1"
    assert outward_address({"GLOO_SOCKET_IFNAME": "none0"}, "127.0.0.1") is None
    assert outward_address({}, "127.0.0.1") is None
    assert sidecar_address(1, [None, "10.0.0.7"]) == "10.0.0.7"
    assert sidecar_address(0, [None, None, "127.0.0.1"]) == "127.0.0.1", "all are on one machine"
    outward = [
        interface.address
        for interface in interfaces()
        if interface.address and not interface.is_loopback and interface.is_up
    ]
    # The host of rank 0's store takes the address that leads to another; no packet is sent.
    assert sidecar_address(0, [None, "192.0.2.1"]) in {"127.0.0.1", *outward}
    with listen_for_sidecars("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        address, port = listener.getsockname()
        with socket.create_connection((address, port)):
            pass
        with pytest.raises(
            PreflightError, match=f"cannot listen at 127.0.0.1 port {port}: Address already"
        ):
            listen_for_sidecars(address, port)
    with pytest.raises(
        PreflightError, match=r"the watchdog cannot listen at 192\.0\.2\.1: Cannot assign"
    ) as caught:
        listen_for_sidecars("192.0.2.1")
    assert "check that the network of this address is up" in str(caught.value)
