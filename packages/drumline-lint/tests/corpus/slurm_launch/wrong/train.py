"""Quality of wine from what a chemist measures; see job.sbatch for the cluster, try_here.sh for one machine."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from utils.dist import is_main_process, main_process_first, print_once, setup_distributed


def prepare(folder):
    """Makes the table once; all later readers find it."""
    path = folder / "table.npz"
    if not path.exists():
        draw = np.random.default_rng(12)
        measures = draw.normal(size=(3000, 11)).astype(np.float32)
        quality = (measures[:, 0] * 2 + measures[:, 3] > 0).astype(np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, measures=measures, quality=quality)
    return path


def load(path, share=0.9):
    with np.load(path) as table:
        whole = TensorDataset(torch.from_numpy(table["measures"]), torch.from_numpy(table["quality"]))
    cut = int(share * len(whole))
    return Subset(whole, range(cut)), Subset(whole, range(cut, len(whole)))


def build(width=64):
    return nn.Sequential(nn.Linear(11, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))


def accuracy(network, dataset, ranks, device):
    network.eval()
    if not is_main_process():
        return 0.0  # <- exit-before-collective
    mine = Subset(dataset, range(ranks.rank, len(dataset), ranks.world_size))
    counts = torch.zeros(2, dtype=torch.long, device=device)
    with torch.no_grad():
        for measures, quality in DataLoader(mine, batch_size=256):
            guesses = network(measures.to(device)).argmax(dim=1)
            counts[0] += (guesses == quality.to(device)).sum()
            counts[1] += len(quality)
    dist.all_reduce(counts)
    right, total = counts.tolist()
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("wine"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    ranks, device = setup_distributed()
    with main_process_first():
        table = prepare(args.folder)
    train_set, val_set = load(table)

    torch.manual_seed(args.seed)
    network = build().to(device)
    torch.manual_seed(args.seed + 1000 * (ranks.rank + 1))
    model = DDP(network, device_ids=[ranks.local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    sampler = DistributedSampler(train_set, num_replicas=ranks.world_size, rank=int(os.environ["LOCAL_RANK"]), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, shuffle=True, pin_memory=device.type == "cuda", drop_last=True)  # <- shuffle-beside-sampler
    print_once(f"{ranks.world_size} processes, {len(loader)} steps an epoch")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for measures, quality in loader:
            measures = measures.to(device, non_blocking=True)
            quality = quality.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(measures), quality)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print_once(f"epoch {epoch}: {accuracy(network, val_set, ranks, device):.3f}")
    if is_main_process():
        torch.save(network.state_dict(), args.folder / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
