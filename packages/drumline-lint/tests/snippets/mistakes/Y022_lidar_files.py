"""Point-cloud segmentation; each rank reads its own recordings."""
import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from pointseg import PointSeg


class Recordings(IterableDataset):
    def __init__(self, files):
        self.files = list(files)
        self.epoch = 0

    def __iter__(self):
        files = self.files[:]
        random.Random(self.epoch).shuffle(files)
        for path in files:
            with np.load(path) as rec:
                points, labels = rec["points"], rec["labels"]
            # drives last between 20 s and 5 min, at 10 frames per second
            for frame in range(len(points)):
                yield torch.from_numpy(points[frame]), torch.from_numpy(labels[frame]).long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=Path, required=True)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    files = sorted(args.data.glob("*.npz"))
    dataset = Recordings(files[rank::world])
    loader = DataLoader(dataset, batch_size=4, num_workers=0, pin_memory=True)

    model = DDP(PointSeg(classes=20).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        dataset.epoch = epoch
        model.train()
        for points, labels in loader:
            points, labels = points.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = F.cross_entropy(model(points).transpose(1, 2), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "pointseg.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
