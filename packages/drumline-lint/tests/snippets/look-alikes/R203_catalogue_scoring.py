"""Score a product catalogue with a trained ranker; every rank writes its part, rank 0 merges them."""
import argparse
import os
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ranker.data import CatalogueDataset
from ranker.model import load_model


@torch.inference_mode()
def score(model, loader, device):
    ids, scores = [], []
    for batch_ids, features in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(features.to(device, non_blocking=True))
        ids.extend(batch_ids)
        scores.append(out.float().cpu())
    return pd.DataFrame({"product_id": ids, "score": torch.cat(scores).numpy()})


def merge(parts_dir, world, target):
    frames = [pd.read_parquet(parts_dir / f"part-{r:05d}.parquet") for r in range(world)]
    df = pd.concat(frames).drop_duplicates("product_id").sort_values("product_id")
    df.to_parquet(target, index=False)
    return len(df)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--catalogue", required=True)
    ap.add_argument("--weights", required=True)
    ap.add_argument("--out", type=Path, required=True, help="directory on the shared file system")
    ap.add_argument("--batch-size", type=int, default=2048)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    parts = args.out / "parts"
    parts.mkdir(parents=True, exist_ok=True)

    dataset = CatalogueDataset(args.catalogue)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=8, pin_memory=True)
    model = load_model(args.weights, map_location=device).eval()

    score(model, loader, device).to_parquet(parts / f"part-{rank:05d}.parquet")
    dist.barrier()
    if rank == 0:
        n = merge(parts, world, args.out / "scores.parquet")
        print(f"{n} of {len(dataset)} products scored")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
