import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from retrieval.data import ProductImages
from retrieval.model import load_encoder

logger = logging.getLogger(__name__)


def gather_rows(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


@torch.inference_mode()
def encode(model, loader, device, show):
    feats, labels, index = [], [], []
    for images, y, idx in tqdm(loader, disable=not show):
        with torch.autocast("cuda", dtype=torch.float16):
            z = model(images.to(device, non_blocking=True))
        feats.append(F.normalize(z.float(), dim=-1))
        labels.append(y.to(device))
        index.append(idx.to(device))
    return torch.cat(feats), torch.cat(labels), torch.cat(index)


def recall_at_k(feats, labels, ks, chunk=2048):
    hits = {k: 0 for k in ks}
    for start in range(0, len(feats), chunk):
        q = feats[start:start + chunk]
        sim = q @ feats.t()
        rows = torch.arange(len(q), device=q.device)
        sim[rows, rows + start] = -1
        top = sim.topk(max(ks), dim=1).indices
        match = labels[top] == labels[start:start + chunk].unsqueeze(1)
        for k in ks:
            hits[k] += match[:, :k].any(1).sum().item()
    return {k: h / len(feats) for k, h in hits.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--save", default=None)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)

    model = load_encoder(args.ckpt, map_location="cpu").to(device).eval()
    dataset = ProductImages(args.data, split="test")
    logger.info("%d test images on %d ranks", len(dataset), world)
    shard = Subset(dataset, range(rank, len(dataset), world))
    loader = DataLoader(shard, batch_size=args.batch_size, num_workers=8, pin_memory=True)

    feats, labels, index = encode(model, loader, device, show=rank == 0)
    feats = gather_rows(feats)
    labels = gather_rows(labels)
    index = gather_rows(index)

    order = index.argsort()
    feats, labels = feats[order], labels[order]
    if rank == 0:
        for k, r in recall_at_k(feats, labels, (1, 5, 10)).items():
            logger.info("R@%d = %.4f", k, r)
        if args.save:
            torch.save({"feats": feats.cpu(), "labels": labels.cpu()}, args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
