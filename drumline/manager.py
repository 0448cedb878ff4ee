"""DDPManager: what a rank needs around a training loop, for a user's own loop and for our engine.

    with DDPManager() as ddp:
        model = ddp.wrap(Net())
        for inputs, targets in ddp.loader(dataset, batch_size=64):
            ...

Started by torchrun, srun or `drumline train --procs N`, it joins the group; started alone, the same script runs as
one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.config.resolve import check_section
from drumline.config.schema import WatchConfig
from drumline.data.dataset import fingerprint, is_stream
from drumline.data.delivery import make_resident
from drumline.data.evaluation_loader import EvaluationLoader, IndexedEvaluationLoader, StreamEvaluationLoader
from drumline.data.loader import Loader
from drumline.data.sharding import Sharding
from drumline.data.stream_loader import AnyLoader, StreamLoader
from drumline.data.workers import LoadingOptions
from drumline.distributed import determinism, group
from drumline.distributed.collectives import all_sum, check_same, check_same_weights
from drumline.distributed.failure import Failure, claim_failure, summary
from drumline.distributed.group import choose_backend, choose_device
from drumline.distributed.start.rank_facts import rank_facts
from drumline.distributed.start.rank_rendezvous import Rendezvous
from drumline.distributed.wrap import small_batch_warning, unwrap_model, wrap_model
from drumline.errors import ExitCode, Place, UsageError, log
from drumline.launch.rank_environment import watch_settings_from, write_failure
from drumline.launch.topology import Topology, topology_from
from drumline.net.sealed_store import SealedStore
from drumline.terminal import paragraph
from drumline.watch.failure_kind import failure_kind
from drumline.watch.heartbeat import HeartbeatWriter, LoopHeartbeats, Phase
from drumline.watch.rank.node_watch import NodeWatch
from drumline.watch.rank.progress_monitor import AFTER_PATIENCE_S, ProgressMonitor
from drumline.watch.rank.watched_rank import WatchedRank, watch_rank


class DDPManager:
    """One rank of a job: joins the group, takes its device, seeds, wraps the model, loads data, and leaves cleanly."""

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
        """`deterministic`: use only kernels that give the same bits each time. `captures`: ranks capture CUDA graphs
        independently, not all in the same step. `threads`: the number of CPU threads of this rank.
        `settings`: your own settings, such as `vars(args)`, which `setup()` compares across ranks. `same_code`: whether
        it compares your modules too. `watch`: what to do about a rank that blocks the others; `run`: the folder for
        its diagnoses. `train_timeout_s`: how long one collective may take; in a watched run at least 90 s more than
        `watch.hang_s`."""
        self._watch = watch or WatchConfig()
        check_section("watch", self._watch)
        least_s = 0.0 if self._watch.sidecar == "off" else self._watch.hang_s + AFTER_PATIENCE_S
        self._start_timeout_s, self._train_timeout_s = start_timeout_s, max(train_timeout_s, least_s)
        self._wanted_device, self._wanted_backend = device, backend
        self._seed = seed
        self._deterministic, self._captures, self._threads = deterministic, captures, threads
        self._settings, self._same_code = settings or {}, same_code
        self._run = None if run is None else Path(run)
        self._topology = Topology()
        self._device: torch.device | None = None
        self._rendezvous: Rendezvous | None = None
        self._watched: WatchedRank | None = None
        self._monitor: ProgressMonitor | None = None
        self.heartbeat = HeartbeatWriter()
        """Read by the sidecar, if there is one."""
        self._wrapped: nn.Module | None = None
        self._sharding: Sharding | None = None
        self._pid = os.getpid()

    def setup(self) -> bool:
        """Collective: take this rank's device, join the other ranks, seed. False: this process runs alone."""
        if self._device is not None:
            raise UsageError("DDPManager.setup() was called twice", next_step="call cleanup() in between")
        self._pid = os.getpid()
        topology = topology_from(os.environ)
        self._topology = topology or Topology()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._deterministic:
            os.environ.setdefault(*determinism.CUBLAS_WORKSPACE)
            determinism.use_deterministic_kernels()
        if self._captures:
            os.environ.setdefault(*group.NO_REGISTRATION)
        self._device = choose_device(self._wanted_device, local_rank=self._topology.local_rank)
        with self._node_watch() as node:
            if topology is not None:
                self._join(topology, self._device, node)
            if node is not None:
                self._start_watchdog(node)
        determinism.seed_shared(self._seed)
        return topology is not None

    def cleanup(self, *, broken: bool = False) -> bool:
        """Destroy the group; `broken`: a rank has failed, so do not wait for it. False: the group was not destroyed in
        time, which is logged; the exit of this process, which may then block, gets the same time limit."""
        if os.getpid() != self._pid:  # a child process; the rank itself continues
            return True
        if not broken:
            self.heartbeat.mark(Phase.LEAVING)
        if self._monitor is not None:
            self._monitor.close()
        if not (in_time := group.leave_group(broken=broken)):
            log.warning(
                f"{self.place()}: the process group was not destroyed within {group.LEAVE_S:g} s. Try: release CUDA "
                "graphs with collectives in them (CUDAGraph.reset) before you leave DDPManager"
            )
            group.limit_exit(group.LEAVE_S, failed=broken)
        if not broken:
            self.heartbeat.mark(Phase.LEFT)
        if self._watched is not None:
            self._watched.close()
        self._monitor = self._watched = self._device = self._rendezvous = self._wrapped = None
        return in_time

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if os.getpid() != self._pid:
            return
        first = None
        # To the watchdog, before any call that may block.
        if isinstance(error, SystemExit) and not error.code:
            self.heartbeat.mark(Phase.LEFT)
        elif error is not None:
            self.note_failure(error)
        if isinstance(error, Exception):
            mine = Failure(self.place(), summary(error), ExitCode.TRAINING_FAILED)
            first = self.claim_failure(error, mine)
            error.add_note(f"[{self.place()}]")
        self.cleanup(broken=error is not None)
        if first is not None:
            text = f"{self.place()} stopped because {first.place.clause('crashed')}: {first.error}"
            raise SystemExit(paragraph(text).rstrip()) from None  # Python prints it

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
                "DDPManager is not set up yet", next_step="use `with DDPManager() as ddp:` or call setup()"
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

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective: the sum of a tensor on this rank's device over all ranks, in place."""
        return all_sum(tensor)

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        """Collective: move the model to this rank's device, check that it is the same on all ranks, and wrap it in DDP.
        On one process it gets a wrapper with the same interface: `.module`, `no_sync()`, the names in `state_dict()`.

        Options: sync_batchnorm, find_unused_parameters, broadcast_buffers, bucket_cap_mb, gradient_as_bucket_view,
        static_graph. After this call random numbers differ across ranks, so a second model (in a GAN, for example) may
        be initialized differently on each rank; DDP gives all of them rank 0's weights.
        """
        if self._wrapped is None:
            check_same_weights(model, host=self.host, device=self.device)
        self._wrapped = wrap_model(model, device=self.device, **ddp_options)
        determinism.seed_rank(self._seed, self.rank)
        self._warn_about_small_batches()
        return self._wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Your own model without the wrappers of `wrap` and torch.compile: its `state_dict()` has your own names."""
        return unwrap_model(model)

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        train: bool = True,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        shards: int | None = None,
        workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        prefetch_factor: int = 2,
        resident: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        compare: bool = True,
    ) -> Any:
        """Collective: a loader for this rank's part of a dataset, on its device; each sample once an epoch over all.

        `train=True`: reshuffled each epoch; `batch_size` is the global batch of one optimizer step. Multiply a mean
        loss by `loader.scale`: then the averaged gradient is the gradient of the whole global batch, even where it was
        split unevenly. `accumulate` is the number of micro-batches of a rank's part, `micro_batch_size` their largest
        size.
        `train=False`: in order, in batches of `batch_size`, round-robin over the ranks; sum what you measure with
        `ddp.sum`.
        `resident`: keep all samples in the memory of the GPU.
        `compare`: compare the length and a few samples across ranks, which must have the same dataset.
        """
        if compare and self.world_size > 1:
            check_same(
                {f"the {'training' if train else 'evaluation'} data": fingerprint(dataset)},
                host=self.host,
                device=self.device,
                next_step="give every rank the same dataset; if they are meant to differ, loader(..., compare=False)",
            )
        if resident:
            dataset, workers = make_resident(dataset, self.device, workers=workers, warns=self.rank == 0)
        options = LoadingOptions(
            workers=workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            collate=collate,
        )
        sharding = Sharding(
            batch_size=batch_size,
            rank=self.rank,
            world_size=self.world_size,
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            shards=shards,
        )
        streams = is_stream(dataset)
        if not train:
            evaluate: Callable[..., EvaluationLoader] = StreamEvaluationLoader if streams else IndexedEvaluationLoader
            evaluation = evaluate(dataset, sharding=sharding, device=self.device, options=options)
            evaluation.observer = LoopHeartbeats(self.heartbeat, Phase.EVALUATION, group.collective_counter())
            return evaluation
        self._sharding = sharding
        self._warn_about_small_batches()
        make: Callable[..., AnyLoader] = StreamLoader if streams else Loader
        loader = make(dataset, sharding=sharding, device=self.device, seed=self._seed, options=options)
        loader.observer = LoopHeartbeats(self.heartbeat, Phase.USER, group.collective_counter())
        return loader

    @property
    def store(self) -> SealedStore | None:
        """The key-value store of this job's ranks, which still works when the group is broken; None on one process."""
        return None if self._rendezvous is None else self._rendezvous.store

    @property
    def watch_folder(self) -> Path | None:
        """Where this node's sidecar and its ranks exchange files; None: there is no sidecar."""
        return None if self._watched is None else self._watched.folder

    def note_failure(self, error: BaseException) -> None:
        """Report the failure to the watchdog, before any call that may block."""
        recorder = self.heartbeat if self._watched is None else self._watched
        recorder.fail(summary(error), failure_kind(error))

    def claim_failure(self, error: BaseException, mine: Failure) -> Failure | None:
        """Report to the other ranks and the launcher that this rank has failed. None: it failed first; otherwise the
        earlier failure."""
        first = None
        if self._rendezvous is not None:
            by_rank_0 = not self._topology.agent_hosts_store and self.world_size > 1
            first = claim_failure(self._rendezvous.store, mine, error, rank_0_hosts_store=by_rank_0)
        write_failure(os.environ, (first or mine).record())
        return first

    def _node_watch(self) -> contextlib.AbstractContextManager[NodeWatch | None]:
        """None: this rank is not to be watched."""
        wanted = self._watch.sidecar
        if wanted == "on" or (wanted == "auto" and self.world_size > 1):
            given = watch_settings_from(os.environ)
            return NodeWatch(self._topology, self._watch, folder=given.folder, run=self._run)
        return contextlib.nullcontext()

    def _join(self, topology: Topology, device: torch.device, node: NodeWatch | None) -> None:
        backend = choose_backend(self._wanted_backend, device=device)
        own = {
            "number of ranks": topology.world_size,
            "seed": self._seed,
            "start timeout": self._start_timeout_s,
            "train timeout": self._train_timeout_s,
            "choice of deterministic kernels": self._deterministic,
            "choice of a sidecar": self._watch.sidecar,
        }
        facts = rank_facts(
            os.environ, backend=backend, device=device, own=own, settings=self._settings, same_code=self._same_code
        )
        self._rendezvous = group.join_group(
            topology,
            backend=backend,
            device=device,
            start_timeout_s=self._start_timeout_s,
            train_timeout_s=self._train_timeout_s,
            facts=facts,
            environment=os.environ,
            service=node,
        )

    def _start_watchdog(self, node: NodeWatch) -> None:
        """From here on a sidecar watches this rank, where it can."""
        self._watched = watch_rank(node.options(self._rendezvous), node.listener, self.rank)
        if self._watched is not None:
            self.heartbeat = self._watched.heartbeat
            self.heartbeat.mark(Phase.USER)
            self._monitor = ProgressMonitor(self.heartbeat, patience_s=self._watch.hang_s, sign=self._versions)

    def _versions(self) -> Hashable:
        """The version counters of parameters and gradients, which a backward pass and an optimizer step increase."""
        parameters = iter(()) if self._wrapped is None else self._wrapped.parameters()
        trained = next((one for one in parameters if one.requires_grad), None)
        if trained is None or (grad := trained.grad) is None:
            return trained is None or trained._version
        return trained._version, id(grad), grad._version

    def _warn_about_small_batches(self) -> None:
        """Warn when both the model and the batch size are known; either may come first."""
        if self._wrapped is None or (split := self._sharding) is None or self.rank != 0:
            return
        in_shards = split.shards is not None
        num_parts = max(1, split.num_shards * split.accumulate)
        size = min(split.micro_batch_size or split.batch_size, split.batch_size // num_parts)
        warning = small_batch_warning(unwrap_model(self._wrapped), batch_size=size, in_shards=in_shards)
        if warning and (self.world_size > 1 or in_shards):
            log.warning(warning)
            self._sharding = None
