import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from rec.data import MovieLens
from rec.model import NeuMF


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def main(rank, world_size, epochs, batch_size):
    ddp_setup(rank, world_size)
    ds = MovieLens("/data/ml-20m")
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank)
    loader = DataLoader(ds, batch_size=batch_size, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(NeuMF(ds.n_users, ds.n_items).to(rank), device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = torch.nn.BCEWithLogitsLoss()

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for user, item, label in loader:
            logits = model(user.to(rank), item.to(rank))
            loss = bce(logits, label.to(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} | loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), "neumf.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, 20, 4096), nprocs=2, join=True)
