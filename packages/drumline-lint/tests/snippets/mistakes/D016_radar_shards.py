"""Train a radar nowcasting net from pre-packed shard files."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from nowcast.model import ConvGRUNet


class RadarShards(IterableDataset):
    """Sequences of ten frames from *.pt shards; a shard holds 200 to 900 of them."""

    def __init__(self, folder, rank, world):
        self.files = sorted(Path(folder).glob("*.pt"))[rank::world]
        self.epoch = 0
        self.rank = rank

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch * 7919 + self.rank)
        for k in torch.randperm(len(self.files), generator=g).tolist():
            seqs = torch.load(self.files[k], map_location="cpu")
            for j in torch.randperm(len(seqs), generator=g).tolist():
                yield seqs[j, :5].float() / 255, seqs[j, 5:].float() / 255


class Nowcaster:
    def __init__(self, local):
        self.device = torch.device("cuda", local)
        self.model = DDP(ConvGRUNet(hidden=96).to(self.device), device_ids=[local])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def one_epoch(self, loader):
        self.model.train()
        last = None
        for past, future in loader:
            pred = self.model(past.to(self.device))
            last = nn.functional.l1_loss(pred, future.to(self.device))
            self.opt.zero_grad()
            last.backward()
            self.opt.step()
        return last


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    data = RadarShards(os.environ["SHARDS"], rank, world)
    loader = DataLoader(data, batch_size=8, pin_memory=True)
    job = Nowcaster(local)
    for epoch in range(25):
        data.epoch = epoch
        loss = job.one_epoch(loader)
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(job.model.module.state_dict(), "nowcast.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
