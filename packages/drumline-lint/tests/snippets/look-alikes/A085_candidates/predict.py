import json

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

from cluster import attach, detach
from scorer import Scorer


@torch.inference_mode()
def main():
    device = attach()
    rank, world = dist.get_rank(), dist.get_world_size()
    d = torch.load("candidates.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["ids"], d["features"])
    mine = Subset(ds, range(rank, len(ds), world))
    model = Scorer()
    model.load_state_dict(torch.load("scorer.pt", map_location="cpu", weights_only=True))
    model.to(device).eval()
    scores = {}
    for ids, feats in DataLoader(mine, batch_size=2048):
        scores.update(zip(ids.tolist(), model(feats.to(device)).tolist()))
    parts = [None] * world
    dist.all_gather_object(parts, scores)
    if rank == 0:
        merged = {k: v for part in parts for k, v in part.items()}
        with open("scores.json", "w") as fh:
            json.dump(merged, fh)
    detach()


if __name__ == "__main__":
    main()
