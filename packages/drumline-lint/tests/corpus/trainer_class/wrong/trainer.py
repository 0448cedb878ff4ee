"""Runs the epochs, takes snapshots, goes on from one."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 1
    batch_size: int = 16
    log_every: int = 50
    save_every: int = 1
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    seed: int = 0


@dataclass
class Snapshot:
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config, model, optimizer, train_set, test_set):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if self.cuda else torch.device("cpu")
        self.sampler = DistributedSampler(train_set, seed=config.seed)
        self.train_loader = self._loader(train_set, self.sampler)
        self.test_loader = self._loader(Subset(test_set, range(self.global_rank, len(test_set), self.world_size)))
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.cuda)
        self.epochs_run = 0
        self.model = model.to(self.device)
        self._load_snapshot()
        self.ddp = DDP(self.model, device_ids=[self.local_rank] if self.cuda else None)
        torch.manual_seed(config.seed + self.global_rank)

    def _loader(self, dataset, sampler=None):
        return DataLoader(dataset, batch_size=self.config.batch_size, sampler=sampler, pin_memory=self.cuda, drop_last=sampler is not None)

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            return
        snapshot = torch.load(self.config.snapshot_path)  # <- load-without-map-location
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        self.epochs_run = snapshot["finished_epoch"] + 1

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(
            model_state=self.ddp.module.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            finished_epoch=epoch,
        )
        torch.save(asdict(snapshot), self.config.snapshot_path)  # <- local-rank-save, scaler-not-saved

    def _run_batch(self, tokens, targets):
        with torch.amp.autocast(self.device.type, dtype=torch.float16, enabled=self.cuda):
            _, loss = self.ddp(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), self.config.grad_norm_clip)  # <- clip-before-unscale
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()  # <- sync-every-step

    def _run_epoch(self, epoch):
        self.ddp.train()
        self.sampler.set_epoch(epoch)
        for step, (tokens, targets) in enumerate(self.train_loader):
            tokens = tokens.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(tokens, targets)
            if step % self.config.log_every == 0 and self.global_rank == 0:
                print(f"epoch {epoch} step {step} loss {loss:.4f}")

    @torch.no_grad()
    def _test(self):
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        for tokens, targets in self.test_loader:
            tokens = tokens.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            _, loss = self.model(tokens, targets)
            sums[0] += loss * targets.numel()
            sums[1] += targets.numel()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            test_loss = self._test()
            if self.global_rank == 0:
                print(f"epoch {epoch}: test loss {test_loss:.4f}")
