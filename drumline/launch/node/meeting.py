"""Opens the meeting place of a node's job: the store that the first node's launcher keeps, and what runs in it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from drumline.errors import PreflightError
from drumline.launch.node.addresses import LOOPBACK, own_address, wait_for_port
from drumline.launch.node.node_heartbeats import make_handler
from drumline.launch.node.rendezvous import FixedRanks
from drumline.launch.node.roll import Roll
from drumline.launch.node.sockets import listen_on_loopback, notice_silence
from drumline.launch.torchrun import KEEP_ALIVE_ATTEMPTS, OWN_STORE, RUN_ID, Node

STORE_TIMEOUT_S = 30


class Alone(RendezvousHandler):
    """One machine has nobody to meet. Every attempt gets a store of its own, which only this machine can reach."""

    sidecars: tuple[str, ...] = ()
    """One has nobody to talk to."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self.secret = ""

    def get_backend(self) -> str:
        return "alone"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener, port = listen_on_loopback()
        self.store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
        )
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return RUN_ID

    def shutdown(self) -> bool:
        self.store = None
        return True


def open_rendezvous(node: Node) -> Alone | FixedRanks:
    """The meeting place of this node's job; the node with rank 0 keeps it."""
    if node.num_nodes == 1:
        return Alone()
    if node.node_rank > 0:
        # One starter that reached all hosts knows that they are up.
        are_up = node.job and not node.may_shrink
        hosts = (node.peers[node.node_rank], node.peers[0]) if are_up else None
        wait_for_port(node.endpoint, timeout_s=node.join_timeout_s, hosts=hosts)
    # c10d would else wait, on a node that comes later, for a place that was named in an earlier round only.
    os.environ[OWN_STORE.partition("=")[0]] = OWN_STORE.partition("=")[2]
    address = address_of(node)
    store = _open_store(node, is_master=node.node_rank == 0)
    keys = _open_store(node, is_master=False)
    roll = Roll(_open_store(node, is_master=False), node)
    notice_silence(_port(node), after_s=node.lost_after_s)
    roll.check_job()
    roll.sign_in()
    settings = RendezvousSettings(
        RUN_ID,
        node.min_nodes or node.num_nodes,
        node.num_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=node.join_timeout_s), last_call=timedelta(seconds=node.last_call_s)
        ),
        keep_alive_interval=timedelta(seconds=max(1, node.lost_after_s // KEEP_ALIVE_ATTEMPTS)),
        keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
    )
    inner = make_handler(store, keys, settings, address)
    return FixedRanks(inner, node, address, roll)


def _open_store(node: Node, *, is_master: bool) -> dist.TCPStore:
    host = node.endpoint.rpartition(":")[0]
    try:
        return dist.TCPStore(
            host,
            _port(node),
            is_master=is_master,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        if is_master and "EADDRINUSE" in str(error):
            what = f"port {_port(node)} of {socket.gethostname()}, where the nodes would meet, is in use"
            next_step = (
                "end what uses it (another job, or an earlier start of this one?), or take another: "
                "--port, or MASTER_PORT"
            )
        else:
            what = f"no store could be opened at {node.endpoint}: {str(error).strip().splitlines()[0]}"
            next_step = "see what listens there: it must be the launcher of the node with NODE_RANK 0"
        raise PreflightError(what, next_step=next_step) from error


def _port(node: Node) -> int:
    return int(node.endpoint.rpartition(":")[2])


def address_of(node: Node) -> str:
    """What the other nodes call this one."""
    if node.num_nodes == 1:
        return LOOPBACK
    return node.address or own_address(node.endpoint)
