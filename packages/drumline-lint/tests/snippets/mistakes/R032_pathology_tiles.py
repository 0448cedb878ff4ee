import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModel

from pathology.tiles import TileDataset


@dataclass
class Config:
    data: str
    encoder: str
    out: str = "probe.pt"
    epochs: int = 20
    freeze_epochs: int = 5
    batch_size: int = 48
    head_lr: float = 1e-3
    encoder_lr: float = 1e-5
    workers: int = 8


class TileClassifier(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(encoder, add_pooling_layer=False)
        self.head = nn.Sequential(nn.LayerNorm(self.encoder.config.hidden_size),
                                  nn.Linear(self.encoder.config.hidden_size, classes))

    def set_encoder_trainable(self, flag):
        for p in self.encoder.parameters():
            p.requires_grad_(flag)

    def forward(self, x):
        return self.head(self.encoder(pixel_values=x).last_hidden_state[:, 0])


def main(cfg: Config):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    rank = dist.get_rank()

    ds = TileDataset(cfg.data, split="train")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, cfg.batch_size, sampler=sampler, num_workers=cfg.workers, pin_memory=True, drop_last=True)

    net = TileClassifier(cfg.encoder, ds.num_classes).to(device)
    net.set_encoder_trainable(False)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW([
        {"params": net.head.parameters(), "lr": cfg.head_lr},
        {"params": net.encoder.parameters(), "lr": cfg.encoder_lr},
    ], weight_decay=0.05)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(cfg.epochs):
        if epoch == cfg.freeze_epochs:
            model.module.set_encoder_trainable(True)
            if rank == 0:
                print("encoder unfrozen", flush=True)
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x)
            loss = criterion(logits.float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            stats += torch.stack([loss.detach(), (logits.argmax(1) == y).float().mean()])
        dist.all_reduce(stats, op=dist.ReduceOp.AVG)
        if rank == 0:
            loss_avg, acc = (stats / len(loader)).tolist()
            print(f"epoch {epoch} loss {loss_avg:.4f} train acc {acc:.4f}", flush=True)
            torch.save(net.state_dict(), cfg.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Config))
