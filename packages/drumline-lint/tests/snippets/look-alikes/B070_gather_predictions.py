"""Distributed inference with a final gather on rank 0."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def padded_indices(n, rank, world):
    """Same number of indices on each rank; the tail repeats and is cut off after the merge."""
    per_rank = (n + world - 1) // world
    start = rank * per_rank
    return [min(i, n - 1) for i in range(start, start + per_rank)]


def collect(scores, n):
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        parts = [torch.empty_like(scores) for _ in range(world)]
        dist.gather(scores, gather_list=parts, dst=0)
        return torch.cat(parts)[:n].cpu()
    else:
        dist.gather(scores, dst=0)
        return None


def build(path, device):
    net = nn.Sequential(nn.Linear(300, 512), nn.ReLU(), nn.Linear(512, 1))
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.to(device).eval()


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="ranker.pt")
    ap.add_argument("--candidates", default="candidates.pt")
    ap.add_argument("--out", default="scores.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    data = TensorDataset(torch.load(args.candidates, map_location="cpu", weights_only=True))
    shard = Subset(data, padded_indices(len(data), dist.get_rank(), dist.get_world_size()))
    net = build(args.weights, device)
    scores = torch.cat([net(x.to(device)).squeeze(-1) for (x,) in DataLoader(shard, batch_size=4096)])
    merged = collect(scores, len(data))
    if merged is not None:
        torch.save(merged, args.out)
        print(f"{len(merged)} scores, mean {merged.mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
