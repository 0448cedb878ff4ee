"""How a rank begins and ends: it takes its device, joins the others, and leaves cleanly, however
its loop ends."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import ExitCode, Place, UsageError, log, summary
from drumline.base.terminal import paragraph
from drumline.base.topology import Topology, topology_from
from drumline.checkpoint.own_loop import Checkpoint
from drumline.config.resolve import check_section
from drumline.config.schema import WatchConfig
from drumline.parallel.wrap import explain_unused
from drumline.rank import determinism, group
from drumline.rank.compile_cache import use_private_cache
from drumline.rank.failure import Failure
from drumline.rank.group import choose_backend, choose_device
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.rank_facts import rank_facts
from drumline.rank.rendezvous.rank_rendezvous import NodeService, Rendezvous
from drumline.rank.watched.job_connection import JobConnection
from drumline.rank.watched.progress_monitor import AFTER_PATIENCE_S
from drumline.watch.heartbeat import Phase


class BackwardPasses:
    """Counts the backward passes that reach one parameter."""

    def __init__(self) -> None:
        self.number = 0

    def count(self, _: Tensor) -> None:
        self.number += 1


class RankLifecycle:
    """What DDPManager is, without its tools for a loop."""

    def __init__(
        self,
        *,
        device: str = "auto",
        backend: str = "auto",
        start_timeout_s: float = 180.0,
        train_timeout_s: float = 600.0,
        seed: int = 0,
        deterministic: bool = False,
        captures: bool = False,
        threads: int | None = None,
        settings: Mapping[str, Any] | None = None,
        same_code: bool = True,
        watch: WatchConfig | None = None,
        run: str | Path | None = None,
    ) -> None:
        """`deterministic`: use only kernels that give the same bits each time. `captures`: ranks
        capture CUDA graphs independently, not all in the same step. `threads`: the number of CPU
        threads of this rank. `settings`: your own settings, such as `vars(args)`, which `setup()`
        compares across ranks. `same_code`: whether it compares your modules too. `watch`: what to
        do about a rank that blocks the others; `run`: the folder for its diagnoses.
        `train_timeout_s`: how long one collective may take; in a watched run at least 90 s more
        than `watch.hang_s`."""
        self._watch = watch or WatchConfig()
        check_section("watch", self._watch)
        least_s = 0.0 if self._watch.sidecar == "off" else self._watch.hang_s + AFTER_PATIENCE_S
        self._start_timeout_s = start_timeout_s
        self.train_timeout_s = max(train_timeout_s, least_s)
        """How long one collective may take."""
        self._wanted_device = device
        self._wanted_backend = backend
        self._seed = seed
        self._deterministic = deterministic
        self._captures = captures
        self._threads = threads
        self._settings = settings or {}
        self._same_code = same_code
        self._run = None if run is None else Path(run)
        self._topology = Topology()
        self._device: torch.device | None = None
        self.connection = JobConnection()
        """For the engine: the store, the heartbeat and the report of a failure. It may change with
        any version."""
        self._checkpoints: list[Checkpoint] = []
        self._wrapped: nn.Module | None = None
        self._trained: nn.Parameter | None = None
        """One parameter of it that is trained."""
        self._passes = BackwardPasses()
        self._pid = os.getpid()

    def setup(self, _live: LiveNodes | None = None) -> bool:
        """Collective: take this rank's device, join the other ranks, seed. False: this process runs
        alone."""
        if self._device is not None:
            raise UsageError(
                "DDPManager.setup() was called twice", next_step="call cleanup() in between"
            )
        self._pid = os.getpid()
        use_private_cache()  # under another launcher, or none
        topology = topology_from(os.environ) if _live is None else _live.topology()
        self._topology = self.connection.topology = topology or Topology()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._deterministic:
            os.environ.setdefault(*determinism.CUBLAS_WORKSPACE)
            determinism.use_deterministic_kernels()
        if self._captures:
            os.environ.setdefault(*group.NO_REGISTRATION)
        self._device = choose_device(self._wanted_device, local_rank=self._topology.local_rank)
        with self.connection.node_watch(
            self._watch, run=self._run, environment=os.environ, live=_live
        ) as node:
            if topology is not None:
                self.connection.rendezvous = self._join(topology, node, _live)
            if node is not None:
                self.connection.start_watchdog(node, self._watch, sign=self._versions)
        determinism.seed_shared(self._seed)
        return topology is not None

    def cleanup(self, *, broken: bool = False) -> bool:
        """Destroy the group; `broken`: a rank has failed, so do not wait for it. False: the group
        was not destroyed in time, which is logged; the exit of this process, which may then block,
        gets the same time limit."""
        if os.getpid() != self._pid:  # a child process; the rank itself continues
            return True
        failed_save = self._finish_saves(logs=broken)
        if not broken:
            self.connection.heartbeat.mark(Phase.LEAVING)
        self.connection.stop_monitor()
        if not (in_time := group.leave_group(broken=broken)):
            log.warning(
                f"{self.place()}: the process group was not destroyed within {group.LEAVE_S:g} s. Try: release CUDA "
                "graphs with collectives in them (CUDAGraph.reset) before you leave DDPManager"
            )
            group.limit_exit(group.LEAVE_S, failed=broken)
        if not broken:
            self.connection.heartbeat.mark(Phase.LEFT)
        self.connection.close()
        self._device = self._wrapped = self._trained = None
        if failed_save is not None:
            raise failed_save
        return in_time

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if os.getpid() != self._pid:
            return
        first = None
        failed_save = self._finish_saves() if error is None else None
        error = failed_save if error is None else error
        if error is not None and (unused := explain_unused(error)):
            error.add_note(unused)
        # To the watchdog, before any call that may block.
        if isinstance(error, SystemExit) and not error.code:
            self.connection.heartbeat.mark(Phase.LEFT)
        elif error is not None:
            self.connection.note_failure(error)
        if isinstance(error, Exception):
            failure = Failure(self.place(), summary(error), ExitCode.TRAINING_FAILED)
            first = self.connection.claim_failure(error, failure, environment=os.environ)
            error.add_note(f"[{self.place()}]")
        self.cleanup(broken=error is not None)
        if first is not None:
            raise SystemExit(
                paragraph(f"{self.place()} stopped because {first.sentence}").rstrip()
            ) from None  # Python prints it
        if failed_save is not None:
            raise failed_save

    def _finish_saves(self, *, logs: bool = False) -> Exception | None:
        """Wait for checkpoints that are being written; returns the error of one that could not be,
        unless it `logs`."""
        checkpoints, self._checkpoints = self._checkpoints, []
        try:
            for checkpoint in checkpoints:
                checkpoint.close(failed=logs)
        except Exception as error:
            return error
        return None

    @property
    def rank(self) -> int:
        return self._topology.rank

    @property
    def world_size(self) -> int:
        return self._topology.world_size

    @property
    def local_world_size(self) -> int:
        return self._topology.local_world_size

    @property
    def host(self) -> str:
        return self._topology.host

    @property
    def device(self) -> torch.device:
        if self._device is None:
            raise UsageError(
                "DDPManager is not set up yet",
                next_step="use `with DDPManager() as ddp:` or call setup()",
            )
        return self._device

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None on one process."""
        return str(dist.get_backend()) if dist.is_initialized() else None

    @property
    def is_restart(self) -> bool:
        """Whether the launcher has started this job before."""
        return self._topology.is_restart

    def is_main_process(self) -> bool:
        """True on rank 0 only: for printing, and for writing what should be written once."""
        return self.rank == 0

    def get_local_rank(self) -> int:
        """This rank's number on its own host, which is also the number of its GPU."""
        return self._topology.local_rank

    def place(self, step: int | None = None) -> Place:
        """This rank, its host and the step, for messages."""
        return Place(host=self.host, rank=self.rank, step=step)

    def barrier(self) -> None:
        """Collective: wait until every rank has called it."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.device.index] if dist.get_backend() == "nccl" else None)

    def _join(
        self, topology: Topology, node: NodeService | None, live: LiveNodes | None
    ) -> Rendezvous:
        device = self.device
        backend = choose_backend(self._wanted_backend, device=device)
        options = {
            "number of ranks": topology.world_size,
            "seed": self._seed,
            "start timeout": self._start_timeout_s,
            "train timeout": self.train_timeout_s,
            "choice of deterministic kernels": self._deterministic,
            "choice of a sidecar": self._watch.sidecar,
        }
        facts = rank_facts(
            os.environ,
            backend=backend,
            device=device,
            options=options,
            settings=self._settings,
            same_code=self._same_code,
        )
        return group.join_group(
            topology,
            backend=backend,
            device=device,
            start_timeout_s=self._start_timeout_s,
            train_timeout_s=self.train_timeout_s,
            facts=facts,
            environment=os.environ,
            service=node,
            live=live,
        )

    def _observe_progress(self, model: nn.Module, *, counts_passes: bool) -> None:
        """From here on `_versions` shows the progress of this model. `counts_passes`: of a user's
        own loop."""
        self._trained = next(
            (parameter for parameter in model.parameters() if parameter.requires_grad), None
        )
        if counts_passes and self._trained is not None:
            self._trained.register_post_accumulate_grad_hook(self._passes.count)  # type: ignore[no-untyped-call]

    def _versions(self) -> Hashable:
        """What a backward pass and an optimizer step change, for the thread of the progress
        monitor. That thread must not read a `.grad`: autograd replaces it without the GIL, and the
        gradient would be freed twice (tests/gradient_race.py)."""
        return None if self._trained is None else (self._trained._version, self._passes.number)
