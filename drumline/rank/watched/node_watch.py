"""The watch folder of a node and the socket of its sidecar: made by the node's first rank, and
carried to all ranks by their rendezvous."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import socket
import stat
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from drumline.base.errors import PreflightError
from drumline.base.job_secret import new_secret
from drumline.base.rank_environment import WITHOUT_WATCH, Topology, WatchSettings, sidecar_secret
from drumline.base.untrusted import check_own_folder
from drumline.config.schema import WatchConfig
from drumline.net.interfaces import LOOPBACK, interface_towards, interfaces
from drumline.watch.sidecar.sidecar_options import Peer, SidecarOptions
from drumline.watch.watch_folder import DIAGNOSIS, MEMORY, hold, make_memory_folder

if TYPE_CHECKING:
    from drumline.rank.rendezvous.rank_rendezvous import Rendezvous


class NodeWatch:
    """A `NodeService`, and a context: what it made is removed when an error leaves that."""

    def __init__(
        self,
        topology: Topology,
        watch: WatchConfig,
        settings: WatchSettings,
        *,
        run: Path | None,
        continues: bool = False,
        prometheus: str = "",
    ) -> None:
        self.rank = topology.rank
        self._given = settings.folder
        self._folder: Path | None = None
        self._lock: int | None = None
        self.listener: int | None = None

        self._alone = SidecarOptions(
            folder="",
            owns_folder=settings.folder is None,
            node=0,
            host=topology.host,
            ranks=(0,),
            world_size=topology.world_size,
            run=None if run is None else str(run.absolute()),
            on_hang=watch.on_hang,
            continues=continues,
            hang_s=watch.hang_s,
            lost_s=watch.lost_s,
            launcher_link=settings.launcher_link,
            slow_factor=watch.slow_factor,
            prometheus=prometheus,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
        if kind is not None and self.listener is not None:
            os.close(self.listener)
        if kind is not None and self._folder is not None and self._given is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def prepare(self) -> dict[str, Any]:
        """Make the watch folder of this node."""
        self._folder = make_watch_folder(self._given)

        # Of a node that was lost, and that this group continues without.
        (self._folder / DIAGNOSIS).unlink(missing_ok=True)

        if self._given is None:
            # If this rank is killed while it waits, the next job removes the folder.
            self._lock = hold(self._folder)

        return {"folder": str(self._folder)}

    def listen(self, rendezvous: Rendezvous) -> dict[str, Any]:
        """Open the port at which the sidecars of other nodes reach this one."""
        address = sidecar_address(rendezvous.node_of(self.rank), rendezvous.addresses)
        with listen_for_sidecars(address) as listener:
            port = listener.getsockname()[1]
            self.listener = listener.detach()
        return {"address": address, "port": port}

    def options(self, rendezvous: Rendezvous | None) -> SidecarOptions:
        """For this node's sidecar, after the rendezvous; None: there is a single rank. The listener
        is no longer ours: whoever takes the options closes it."""
        if rendezvous is None:
            return replace(self._alone, folder=self.prepare()["folder"], secret=new_secret())

        node = rendezvous.node_of(self.rank)
        store = rendezvous.store
        services = rendezvous.services

        options = replace(
            self._alone,
            folder=str(self._folder or make_watch_folder(Path(services[node]["folder"]))),
            secret=sidecar_secret(store.secret, store.prefix) or "",
            peers=tuple(
                Peer(number, rendezvous.hosts[number], service["address"], service["port"])
                for number, service in enumerate(services)
                if number != node
            ),
            node=node,
            ranks=tuple(rendezvous.nodes[node]),
            listener=self.listener,
        )

        self.listener = None
        return options


def options_from_launcher(
    settings: WatchSettings,
    topology: Topology,
    *,
    node: int,
) -> SidecarOptions:
    """For ranks that have no rendezvous of ours. The other nodes' names come with their first
    messages."""
    assert settings.folder is not None
    first = topology.rank - topology.local_rank
    listens = len(settings.nodes) > 1 and topology.local_rank == 0

    return SidecarOptions(
        folder=str(settings.folder),
        owns_folder=False,
        node=node,
        host=topology.host,
        ranks=tuple(range(first, first + topology.local_world_size)),
        world_size=topology.world_size,
        **asdict(settings.script),
        launcher_link=settings.launcher_link,
        secret=settings.secret or "",
        peers=tuple(
            Peer(number, address, address, port)
            for number, (address, port) in enumerate(settings.nodes)
            if number != node
        ),
        listener=listen_for_sidecars(*settings.nodes[node]).detach() if listens else None,
    )


def sidecar_address(node: int, addresses: Sequence[str | None]) -> str:
    """Where this node's sidecar listens, given the addresses by which nodes are reached. The host
    of rank 0's store takes the one that leads to any other; when no other has one either, all nodes
    are on one machine."""
    this_address = addresses[node]
    if this_address is not None:
        return this_address

    for address in addresses:
        if address and not ipaddress.ip_address(address).is_loopback:
            interface = interface_towards(interfaces(), address)
            if interface is not None and interface.address:
                return interface.address

    return LOOPBACK


def listen_for_sidecars(address: str, port: int = 0) -> socket.socket:
    """`port`: where a launcher tells the others to connect; else any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise PreflightError(
            f"the watchdog cannot listen at {address}{f' port {port}' if port else ''}: {why}",
            next_step=f"check that the network of this address is up; or train without the watchdog: {WITHOUT_WATCH}",
        ) from error


def make_watch_folder(folder: Path | None) -> Path:
    """The one that the launcher gave, made where it is not there yet; else a new one. Never one
    that others can use."""
    if folder is None:
        try:
            return make_memory_folder()
        except OSError as error:
            raise PreflightError(
                f"no folder for the watchdog can be made in {MEMORY} or the temporary folder: {error.strerror}",
                next_step="free some space there, or set TMPDIR to a folder on a disk of this host; or train without "
                f"the watchdog: {WITHOUT_WATCH}",
            ) from error

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_own_folder(folder)

        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o077:
            raise PermissionError(errno.EPERM, f"it is open to others (mode {mode:o})")
    except OSError as error:
        raise PreflightError(
            f"the watch folder {folder} cannot be used: {error.strerror}",
            next_step="leave DRUMLINE_WATCH_DIR to the launcher, or name a folder that does not exist yet",
        ) from error

    return folder
