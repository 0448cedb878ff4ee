"""The options of a sidecar, as JSON on its stdin, because they contain a secret."""

from __future__ import annotations

from dataclasses import dataclass, field

from drumline.base.rank_environment import LOST_AFTER_S


@dataclass(frozen=True)
class Peer:
    """Where the sidecar of a node listens."""

    node: int
    host: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class SidecarOptions:
    """The node, its ranks, the other nodes, and what to do about a hang."""

    folder: str
    """The watch folder: of this node and this start of its ranks."""

    owns_folder: bool
    """Whether the sidecar removes it at its end; a launcher removes its own."""

    node: int
    host: str
    ranks: tuple[int, ...]
    world_size: int
    run: str | None = None
    """The run folder, where diagnoses are written."""

    on_hang: str = "restart"

    continues: bool = False
    """Whether ranks continue without a node that cannot be reached."""

    # None: a rank that may still continue is reported, and never acted on
    hang_s: float | None = None

    launcher_link: str = ""
    """The file with what a launcher over ssh knows of the hosts (LauncherLink)."""

    lost_s: float = float(LOST_AFTER_S)
    """How long an unreachable host is waited for."""

    slow_factor: float = 2.0
    prometheus: str = ""
    """Where metrics are served (`log.prometheus`); empty: nowhere."""

    secret: str = field(default="", repr=False)
    peers: tuple[Peer, ...] = ()
    """The other nodes."""

    listener: int | None = None
    """The socket that it inherits from the first rank of its node, which keeps it open for a
    restarted sidecar."""

    @property
    def ends_job(self) -> bool:
        """Whether a hang ends the job."""
        match self.on_hang:
            case "restart" | "stop":
                return True
            case "report":
                return False
            case _:
                raise ValueError(f"on_hang is {self.on_hang!r}: it takes restart, stop or report")
