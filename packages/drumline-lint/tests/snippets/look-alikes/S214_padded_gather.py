# torchrun --nproc_per_node=4 padded_gather.py --ckpt tagger.pt
import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from tagging import TagSet, Tagger, collate


def gather_variable(t):
    world = dist.get_world_size()
    n = torch.tensor([t.numel()], device=t.device)
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    sizes = [int(s) for s in sizes]
    buf = t.new_zeros(max(sizes))
    buf[: t.numel()] = t
    parts = [torch.empty_like(buf) for _ in range(world)]
    dist.all_gather(parts, buf)
    return torch.cat([p[:s] for p, s in zip(parts, sizes)])


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", required=True)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    ds = TagSet("test")
    mine = Subset(ds, range(rank, len(ds), world))
    loader = DataLoader(mine, batch_size=64, collate_fn=collate, num_workers=2)
    model = Tagger()
    model.load_state_dict(torch.load(args.ckpt, map_location="cpu"))
    model.cuda().eval()

    pred, gold = [], []
    for ids, tags in loader:
        tags = tags.cuda()
        keep = tags >= 0
        pred.append(model(ids.cuda()).argmax(-1)[keep])
        gold.append(tags[keep])
    pred, gold = gather_variable(torch.cat(pred)), gather_variable(torch.cat(gold))
    if rank == 0:
        n_tags = int(gold.max()) + 1
        acc = (pred == gold).double().mean().item()
        f1 = []
        for c in range(n_tags):
            tp = ((pred == c) & (gold == c)).sum().item()
            f1.append(2 * tp / max(1, (pred == c).sum().item() + (gold == c).sum().item()))
        print(f"tokens {gold.numel()} acc {acc:.4f} macro-f1 {sum(f1) / n_tags:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
