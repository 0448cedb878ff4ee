"""DDPManager: what a rank needs around a training loop: it takes its device, joins the others, wraps
the model, loads data, and leaves cleanly, however the loop ends.

    with DDPManager() as ddp:
        model = ddp.wrap(Net())
        for inputs, targets in ddp.loader(dataset, batch_size=64):
            ...

Started by torchrun, srun or `drumline train --procs N`, it joins the group; started alone, the same
script runs as one process. Our engine has a RunManager.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import ExitCode, Place, PreflightError, UsageError, log, summary
from drumline.base.rank_environment import Topology, topology_from
from drumline.base.startup import use_private_cache
from drumline.base.text import paragraph
from drumline.checkpoint.own_loop import Checkpoint
from drumline.checkpoint.store import WritingRank
from drumline.config.resolve import check_section
from drumline.config.rules import METRICS_FORM, metrics_endpoint
from drumline.config.schema import WatchConfig
from drumline.data.dataset import fingerprint, is_stream
from drumline.data.delivery import LoadingOptions, make_resident
from drumline.data.loader import (
    EvaluationLoader,
    IndexedEvaluationLoader,
    IndexedLoader,
    Loader,
    StreamEvaluationLoader,
)
from drumline.data.sharding import Sharding
from drumline.data.stream_loader import StreamLoader
from drumline.parallel.sharded_model import ShardingPlan, shard_model
from drumline.parallel.wrap import (
    Applied,
    explain_unused,
    small_batch_warning,
    unwrap_model,
    wrap_model,
)
from drumline.rank import determinism, group
from drumline.rank.collectives import (
    all_sum,
    check_same,
    check_same_weights,
    collective_counter,
)
from drumline.rank.failure import Failure
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.rank_facts import rank_facts
from drumline.rank.rendezvous.rank_rendezvous import NodeService, Rendezvous, StartOptions
from drumline.rank.watched.job_connection import JobConnection
from drumline.rank.watched.progress_monitor import AFTER_PATIENCE_S
from drumline.watch.heartbeat import LoopHeartbeats, Phase


class LoaderKeywords(TypedDict, total=False):
    """Those that every `DDPManager.loader` takes."""

    workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int
    collate: Callable[[list[Any]], Any] | None
    resident: bool
    compare: bool


SPLITTING = ("accumulate", "micro_batch_size", "shards")


class DDPManager:
    """One rank of a job: joins the group, takes its device, seeds, wraps the model, loads data, and
    leaves cleanly."""

    def __init__(
        self,
        *,
        device: str = "auto",
        backend: str = "auto",
        start_timeout_s: float = 180.0,
        train_timeout_s: float = 600.0,
        seed: int = 0,
        deterministic: bool = False,
        threads: int | None = None,
        settings: Mapping[str, Any] | None = None,
        same_code: bool = True,
        watch: WatchConfig | None = None,
        run: str | Path | None = None,
        prometheus: str | None = None,
    ) -> None:
        """`deterministic`: use only kernels that give the same bits each time. `threads`: the number
        of CPU threads of this rank. `settings`: your own settings, such as `vars(args)`, which
        `setup()` compares across ranks. `same_code`: whether it compares your modules too. `watch`:
        what to do about a rank that blocks the others; `run`: the folder for its diagnoses;
        `prometheus`: where metrics are served, as `--log.prometheus`.
        `train_timeout_s`: how long one collective may take; in a watched run at least 90 s more
        than `watch.hang_s`."""
        self._watch = watch or WatchConfig()
        check_section("watch", self._watch)
        if prometheus is not None and metrics_endpoint(prometheus) is None:
            raise UsageError(f"prometheus is {prometheus!r}; it takes {METRICS_FORM}")

        least_s = 0.0 if self._watch.sidecar == "off" else self._watch.hang_s + AFTER_PATIENCE_S
        self._start_timeout_s = start_timeout_s
        self._train_timeout_s = max(train_timeout_s, least_s)
        self._device_setting = device
        self._backend_setting = backend
        self._seed = seed
        self._deterministic = deterministic
        self._threads = threads
        self._settings = settings or {}
        self._same_code = same_code
        self._run = None if run is None else Path(run)
        self._prometheus = prometheus
        self._topology = Topology()
        self._device: torch.device | None = None
        self._connection = JobConnection()
        self._checkpoints: list[Checkpoint] = []
        self._sharding: Sharding | None = None
        self._wrapped: nn.Module | None = None
        self._trained: nn.Parameter | None = None
        """One parameter of it that is trained."""

        self._num_passes = 0
        """The backward passes of a user's own loop that have reached it."""

        self._pid = os.getpid()

    def setup(self) -> bool:
        """Collective: take this rank's device, join the other ranks, seed. False: this process runs
        alone."""
        return self._set_up(topology_from(os.environ), None)

    def _set_up(self, topology: Topology | None, live: LiveNodes | None) -> bool:
        """Collective: `setup` for these ranks. None: this process runs alone."""
        if self._device is not None:
            raise UsageError(
                "DDPManager.setup() was called twice", next_step="call cleanup() in between"
            )

        self._pid = os.getpid()
        use_private_cache()  # under another launcher, or none
        self._topology = self._connection.topology = topology or Topology()
        if self._threads is not None:
            torch.set_num_threads(self._threads)

        if self._deterministic:
            os.environ.setdefault(*determinism.CUBLAS_WORKSPACE)
            determinism.use_deterministic_kernels()

        self._device = choose_device(self._device_setting, local_rank=self._topology.local_rank)
        with self._connection.node_watch(
            self._watch,
            run=self._run,
            environment=os.environ,
            live=live,
            prometheus=self._prometheus,
        ) as node:
            if topology is not None:
                self._connection.rendezvous = self._join(topology, node, live)
            if node is not None:
                self._connection.start_watchdog(node, self._watch, sign=self._versions)

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
            self._connection.heartbeat.mark(Phase.LEAVING)

        self._connection.stop_monitor()
        if not (in_time := group.leave_group(broken=broken)):
            log.warning(
                f"{self.place()}: the process group was not destroyed within {group.LEAVE_S:g} s. Try: release CUDA "
                "graphs with collectives in them (CUDAGraph.reset) before you leave DDPManager"
            )
            group.limit_exit(group.LEAVE_S, failed=broken)

        if not broken:
            self._connection.heartbeat.mark(Phase.LEFT)

        self._connection.close()
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
            self._connection.heartbeat.mark(Phase.LEFT)
        elif error is not None:
            self._connection.note_failure(error)

        if isinstance(error, Exception):
            failure = Failure(self.place(), summary(error), ExitCode.TRAINING_FAILED)
            first = self._connection.claim_failure(error, failure, environment=os.environ)
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

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective: the sum of a tensor on this rank's device over all ranks, in place."""
        return all_sum(tensor)

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        """Collective: move the model to this rank's device, check that it is the same on all ranks,
        and wrap it in DDP. On one process it gets a wrapper with the same interface: `.module`,
        `no_sync()`, the names in `state_dict()`.

        Options: sync_batchnorm, find_unused_parameters, broadcast_buffers, bucket_cap_mb,
        gradient_as_bucket_view, static_graph, comm (how gradients are sent: none, bf16 or fp16).
        After this call random numbers differ across ranks, so a second model (in a GAN, for
        example) may be initialized differently on each rank; DDP gives all of them rank 0's
        weights.
        """
        self._compare_weights(model)
        wrapped = wrap_model(model, device=self.device, **ddp_options)
        return self._begin_training(wrapped, counts_passes=True)

    def _compare_weights(self, model: nn.Module) -> None:
        """Collective: of the first model; later ones may differ."""
        if self._wrapped is None:
            check_same_weights(model, host=self.host, device=self.device)

    def _begin_training(self, wrapped: nn.Module, *, counts_passes: bool) -> nn.Module:
        """The model is wrapped: from now on its passes and the ranks' random numbers are its own."""
        self._wrapped = wrapped
        trained = (parameter for parameter in wrapped.parameters() if parameter.requires_grad)
        self._trained = next(trained, None)
        if counts_passes and self._trained is not None:
            self._trained.register_post_accumulate_grad_hook(self._count_pass)  # type: ignore[no-untyped-call]

        self._connection.mark_compilations()
        determinism.seed_rank(self._seed, self.rank)
        self._warn_about_small_batches()

        return wrapped

    @contextmanager
    def no_sync(self, *models: nn.Module, unless: bool = False) -> Iterator[None]:
        """In it the gradients of these wrapped models stay on this rank, where they add up; not if
        `unless` is True: then the backward pass averages over the ranks what has added up.

            with ddp.no_sync(model, unless=loader.is_last_micro_batch):
                (criterion(model(inputs), targets) * loader.scale).backward()
        """
        with ExitStack() as stack:
            for model in () if unless else models:
                stack.enter_context(cast(Any, model).no_sync())
            yield

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Your own model without the wrappers of `wrap` and torch.compile: its `state_dict()` has
        your own names."""
        return unwrap_model(model)

    @overload
    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        train: Literal[True] = True,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        shards: int | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> Loader: ...

    @overload
    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        train: Literal[False],
        **options: Unpack[LoaderKeywords],
    ) -> EvaluationLoader: ...

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        train: bool = True,
        resident: bool = False,
        compare: bool = True,
        **options: Any,
    ) -> Loader | EvaluationLoader:
        """Collective: a loader for this rank's part of a dataset, on its device; each sample once
        an epoch over all.

        `train=True`: reshuffled each epoch; `batch_size` is the global batch of one optimizer step.
        Multiply a mean loss by `loader.scale`: then the averaged gradient is the gradient of the
        whole global batch, even where it was split unevenly. `accumulate` is the number of
        micro-batches of a rank's part, `micro_batch_size` their largest size; call
        `optimizer.step()` when `loader.is_last_micro_batch` is true. `train=False`: in order, in
        batches of `batch_size`, round-robin over the ranks; sum what you measure with `ddp.sum`.
        `resident`: keep all samples in the memory of the GPU. `compare`: compare the length and a
        few samples across ranks, which must have the same dataset. `workers`, `pin_memory`,
        `persistent_workers`, `prefetch_factor` and `collate` are those of torch's DataLoader.
        """
        if compare and self.world_size > 1:
            self._compare_data(dataset, "training" if train else "evaluation")

        if resident:
            dataset, options["workers"] = make_resident(
                dataset, self.device, workers=options.get("workers", 0), warns=self.rank == 0
            )

        splitting = {name: options.pop(name) for name in SPLITTING if name in options}
        sharding = Sharding(
            batch_size=batch_size, rank=self.rank, world_size=self.world_size, **splitting
        )

        streams = is_stream(dataset)
        settings: dict[str, Any] = {
            "sharding": sharding,
            "device": self.device,
            "options": LoadingOptions(**options),
        }

        made: Loader | EvaluationLoader
        if train:
            self._sharding = sharding
            self._warn_about_small_batches()
            training = StreamLoader if streams else IndexedLoader
            made = training(dataset, seed=self._seed, **settings)
            phase = Phase.USER
        else:
            evaluation = StreamEvaluationLoader if streams else IndexedEvaluationLoader
            made = evaluation(dataset, **settings)
            phase = Phase.EVALUATION

        made.observer = LoopHeartbeats(self._connection.heartbeat, int(phase), collective_counter())
        return made

    def _compare_data(self, dataset: Any, kind: str) -> None:
        """Collective: an error if ranks have different samples."""
        check_same(
            {f"the {kind} data": fingerprint(dataset)},
            host=self.host,
            next_step="give every rank the same dataset; if they are meant to differ, loader(..., compare=False)",
        )

    def checkpoint(
        self, folder: str | Path, /, *, keep_last: int = 2, **objects: Any
    ) -> Checkpoint:
        """Saves and resumes your loop: models, optimizers, training loaders and whatever else has
        `state_dict()` and `load_state_dict()`, by the names that they are given here. Every rank
        makes it, after the objects.

            checkpoint = ddp.checkpoint("runs/mine", model=model, optimizer=optimizer, loader=loader)
            step = checkpoint.resume()  # before the loop; checkpoint.save(step) in it

        The newest `keep_last` stay, in the folder `checkpoints` of `folder`.
        """
        path = Path(folder).absolute()
        if any(path == checkpoint.folder.absolute() for checkpoint in self._checkpoints):
            raise UsageError(
                f"{folder} is the folder of another ddp.checkpoint already",
                next_step="give all objects to one ddp.checkpoint, or a folder to each",
            )

        checkpoint = Checkpoint(
            Path(folder),
            objects,
            this_rank=WritingRank(self.rank, self.host),
            world_size=self.world_size,
            device=self.device,
            keep_last=keep_last,
            saving=self._in_save,
        )

        self._checkpoints.append(checkpoint)
        return checkpoint

    @contextmanager
    def _in_save(self) -> Iterator[None]:
        """The heartbeat shows a save meanwhile."""
        self._connection.heartbeat.mark(Phase.SAVE)
        yield
        self._connection.heartbeat.mark(Phase.USER)

    def _warn_about_small_batches(self) -> None:
        """Warn when both the model and the batch size are known; either may come first."""
        if self._wrapped is None or (split := self._sharding) is None or self.rank != 0:
            return

        in_shards = split.shards is not None
        num_parts = max(1, split.num_shards * split.accumulate)
        size = min(split.micro_batch_size or split.batch_size, split.batch_size // num_parts)

        warning = small_batch_warning(
            unwrap_model(self._wrapped), batch_size=size, in_shards=in_shards
        )

        if warning and (self.world_size > 1 or in_shards):
            log.warning(warning)
            self._sharding = None

    def _join(
        self, topology: Topology, node: NodeService | None, live: LiveNodes | None
    ) -> Rendezvous:
        """Collective: join the other ranks, which compare what has to be the same."""
        device = self.device
        backend = choose_backend(self._backend_setting, device=device)
        options = {
            "number of ranks": topology.world_size,
            "seed": self._seed,
            "start timeout": self._start_timeout_s,
            "train timeout": self._train_timeout_s,
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

        start = StartOptions(
            timeout_s=self._start_timeout_s, facts=facts, environment=os.environ, service=node
        )

        return group.join_group(
            topology,
            start,
            backend=backend,
            device=device,
            train_timeout_s=self._train_timeout_s,
            live=live,
        )

    def _count_pass(self, _: Tensor) -> None:
        """Called by autograd when the gradient is complete."""
        self._num_passes += 1

    def _versions(self) -> Hashable:
        """What a backward pass and an optimizer step change, for the thread of the progress
        monitor. That thread must not read a `.grad`: autograd replaces it without the GIL, and the
        gradient would be freed twice (tests/gradient_race.py)."""
        return None if self._trained is None else (self._trained._version, self._num_passes)


class RunManager(DDPManager):
    """The manager of a rank that our engine trains or evaluates on."""

    @property
    def connection(self) -> JobConnection:
        """The store, the heartbeat and the report of a failure."""
        return self._connection

    @property
    def train_timeout_s(self) -> float:
        """How long one collective may take."""
        return self._train_timeout_s

    def setup(self, live: LiveNodes | None = None) -> bool:
        """Collective. `live`: the nodes, where those that are left continue without a lost one."""
        return super().setup() if live is None else self._set_up(live.topology(), live)

    def wrap_applied(
        self,
        model: nn.Module,
        *,
        channels_last: bool,
        reduces_gradients: bool,
        **ddp_options: Any,
    ) -> nn.Module:
        """Collective: move the model to its device, and wrap it so that it is called with a function
        of the model, and its arguments. `reduces_gradients`: in DDP, if there is a group."""
        self._compare_weights(model)
        model = model.to(self.device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        wrapped: nn.Module = Applied(model)
        if reduces_gradients and dist.is_initialized():
            wrapped = wrap_model(wrapped, device=self.device, **ddp_options)

        return self._begin_training(wrapped, counts_passes=False)

    def shard(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        *,
        prepare: Callable[[Iterable[tuple[str, nn.Module]]], None] | None = None,
    ) -> nn.Module:
        """Collective: move this rank's shards of the model to its device. `prepare`: as for
        `shard_model`."""
        if prepare is None:
            self._compare_weights(model)
        sharded = shard_model(model, plan, self.device, prepare=prepare)
        return self._begin_training(sharded, counts_passes=False)


def choose_device(setting: str, *, local_rank: int) -> torch.device:
    """The rank's own device; a GPU is made current at once, before anything can touch GPU 0 by
    default."""
    if setting not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"the device is {setting!r}: it takes auto, cpu or cuda",
            next_step="give one of them; with cuda each rank of a machine takes a GPU of its own",
        )

    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")

    num_gpus = torch.cuda.device_count()

    # `srun --gpus-per-task=1` shows each rank its own GPU and no other; the rendezvous checks that
    # they differ.
    index = 0 if num_gpus == 1 else local_rank

    if index >= num_gpus:
        raise PreflightError(
            f"local rank {local_rank} has no GPU of its own: torch sees {num_gpus} on this host",
            next_step="start at most one rank for each GPU, check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
            "--dist.device cpu",
        )

    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_backend(setting: str, *, device: torch.device) -> str:
    """NCCL between GPUs, gloo between CPUs, unless set."""
    if setting == "auto":
        return "nccl" if device.type == "cuda" else "gloo"

    if setting == "nccl" and device.type != "cuda":
        raise PreflightError(
            "dist.backend is 'nccl', but this rank computes on the CPU",
            next_step="use --dist.backend gloo, or --dist.device cuda on a machine with GPUs",
        )

    return setting
