import os
from dataclasses import dataclass

import hydra
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nmt.data import ParallelCorpus, collate
from nmt.model import TransformerNMT


@dataclass
class EarlyStopping:
    patience: int
    min_delta: float = 1e-4
    best: float = float("inf")
    bad: int = 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def val_epoch(model, loader, criterion, device):
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1])
            gold = tgt[:, 1:]
            total += criterion(logits.flatten(0, 1), gold.flatten()).item()
            tokens += gold.ne(0).sum().item()
    model.train()
    return total / max(tokens, 1)


def build_loader(ds, cfg, train):
    sampler = DistributedSampler(ds, shuffle=train, drop_last=train)
    loader = DataLoader(ds, batch_size=cfg.batch_size, sampler=sampler, collate_fn=collate,
                        num_workers=cfg.workers, pin_memory=True, drop_last=train)
    return loader, sampler


@hydra.main(config_path="conf", config_name="wmt", version_base="1.3")
def main(cfg):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(cfg.seed)

    train_loader, train_sampler = build_loader(ParallelCorpus(cfg.data.train), cfg, True)
    val_loader, _ = build_loader(ParallelCorpus(cfg.data.valid), cfg, False)

    model = DDP(TransformerNMT(**cfg.model).to(device), device_ids=[local_rank])
    optim = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    train_crit = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    val_crit = torch.nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
    stopper = EarlyStopping(cfg.patience)

    for epoch in range(cfg.epochs):
        train_sampler.set_epoch(epoch)
        for src, tgt in train_loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1])
            loss = train_crit(logits.flatten(0, 1), tgt[:, 1:].flatten())
            optim.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optim.step()

        val_loss = val_epoch(model.module, val_loader, val_crit, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "last.pt")
        if stopper.step(val_loss):
            print(f"[rank {dist.get_rank()}] early stop at {epoch}, best {stopper.best:.4f}")
            break

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
