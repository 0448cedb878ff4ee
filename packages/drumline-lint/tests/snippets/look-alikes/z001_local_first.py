"""Cell tracking on 2 nodes x 4 GPUs; the archive is unpacked to each node's own disk."""
import os
import tarfile
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tracking import CellMovies, TrackNet, track_loss

LOCAL = Path("/local/cells")


@contextmanager
def local_rank_zero_first(local_rank):
    if local_rank != 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def open_movies():
    done = LOCAL / ".complete"
    if not done.exists():
        LOCAL.mkdir(parents=True, exist_ok=True)
        with tarfile.open("/shared/cells.tar") as archive:
            archive.extractall(LOCAL)
        done.touch()
    return CellMovies(LOCAL)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=1))

    with local_rank_zero_first(local_rank):
        movies = open_movies()

    sampler = DistributedSampler(movies)
    loader = DataLoader(movies, batch_size=6, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(TrackNet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(50):
        sampler.set_epoch(epoch)
        for clip, tracks in loader:
            loss = track_loss(model(clip.cuda(non_blocking=True)), tracks.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"/shared/tracknet/{epoch:02d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
