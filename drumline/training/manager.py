"""DDPManager: what a rank needs around a training loop, for a user's own loop and for our engine.

    with DDPManager() as ddp:
        model = ddp.wrap(Net())
        for inputs, targets in ddp.loader(dataset, batch_size=64):
            ...

Started by torchrun, srun or `drumline train --procs N`, it joins the group; started alone, the same
script runs as one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast, overload

from torch import Tensor, nn

from drumline.base.errors import UsageError, log
from drumline.checkpoint.own_loop import Checkpoint
from drumline.checkpoint.store import WritingRank
from drumline.data.dataset import fingerprint, is_stream
from drumline.data.delivery import make_resident
from drumline.data.evaluation_loader import (
    EvaluationLoader,
    IndexedEvaluationLoader,
    StreamEvaluationLoader,
)
from drumline.data.loader import IndexedLoader, Loader
from drumline.data.sharding import Sharding
from drumline.data.stream_loader import StreamLoader
from drumline.data.workers import LoadingOptions
from drumline.parallel.sharded_model import ShardingPlan, shard_model
from drumline.parallel.wrap import small_batch_warning, unwrap_model, wrap_model
from drumline.rank import determinism, group
from drumline.rank.collectives import all_sum, check_same, check_same_weights
from drumline.training.rank_lifecycle import RankLifecycle
from drumline.watch.heartbeat import LoopHeartbeats, Phase


class DDPManager(RankLifecycle):
    """One rank of a job: joins the group, takes its device, seeds, wraps the model, loads data, and
    leaves cleanly."""

    _sharding: Sharding | None = None

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
        if self._wrapped is None:
            check_same_weights(model, host=self.host, device=self.device)
        wrapped = wrap_model(model, device=self.device, **ddp_options)
        # The engine marks the phases of its steps.
        is_own_loop = not ddp_options.get("applied", False)
        return self._begin_training(wrapped, counts_passes=is_own_loop)

    def shard(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        *,
        prepare: Callable[[Iterable[tuple[str, nn.Module]]], None] | None = None,
    ) -> nn.Module:
        """Collective, for the engine: move this rank's shards of the model to its device.
        `prepare`: as for `shard_model`."""
        if self._wrapped is None and prepare is None:
            check_same_weights(model, host=self.host, device=self.device)
        sharded = shard_model(model, plan, self.device, prepare=prepare)
        return self._begin_training(sharded, counts_passes=False)

    def _begin_training(self, wrapped: nn.Module, *, counts_passes: bool) -> nn.Module:
        self._wrapped = wrapped
        self._observe_progress(wrapped, counts_passes=counts_passes)
        self.connection.mark_compilations()
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
        workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        prefetch_factor: int = 2,
        resident: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        compare: bool = True,
    ) -> Loader: ...

    @overload
    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        train: Literal[False],
        workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        prefetch_factor: int = 2,
        resident: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        compare: bool = True,
    ) -> EvaluationLoader: ...

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
        few samples across ranks, which must have the same dataset.
        """
        if compare and self.world_size > 1:
            check_same(
                {f"the {'training' if train else 'evaluation'} data": fingerprint(dataset)},
                host=self.host,
                device=self.device,
                next_step="give every rank the same dataset; if they are meant to differ, loader(..., compare=False)",
            )
        if resident:
            dataset, workers = make_resident(
                dataset, self.device, workers=workers, warns=self.rank == 0
            )
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
            evaluate: Callable[..., EvaluationLoader] = (
                StreamEvaluationLoader if streams else IndexedEvaluationLoader
            )
            evaluation = evaluate(dataset, sharding=sharding, device=self.device, options=options)
            evaluation.observer = LoopHeartbeats(
                self.connection.heartbeat, Phase.EVALUATION, group.collective_counter()
            )
            return evaluation
        self._sharding = sharding
        self._warn_about_small_batches()
        make: Callable[..., Loader] = StreamLoader if streams else IndexedLoader
        loader = make(
            dataset, sharding=sharding, device=self.device, seed=self._seed, options=options
        )
        loader.observer = LoopHeartbeats(
            self.connection.heartbeat, Phase.USER, group.collective_counter()
        )
        return loader

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
            me=WritingRank(self.rank, self.host),
            world_size=self.world_size,
            device=self.device,
            keep_last=keep_last,
            saving=self._in_save,
        )
        self._checkpoints.append(checkpoint)
        return checkpoint

    @contextmanager
    def _in_save(self) -> Iterator[None]:
        self.connection.heartbeat.mark(Phase.SAVE)
        yield
        self.connection.heartbeat.mark(Phase.USER)

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
