import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fonts import GlyphNet, Glyphs


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(rank, world_size, port, epochs):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    glyphs = Glyphs("/data/fonts")
    sampler = DistributedSampler(glyphs, num_replicas=world_size, rank=rank)
    loader = DataLoader(glyphs, batch_size=256, sampler=sampler, num_workers=4, pin_memory=True)
    model = DDP(GlyphNet().to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, char in loader:
            loss = F.cross_entropy(model(image.to(rank)), char.to(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "glyphs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    mp.spawn(run, args=(gpus, free_port(), 20), nprocs=gpus, join=True)
