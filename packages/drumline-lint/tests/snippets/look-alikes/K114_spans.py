import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset


def gather_ragged(t):
    world = dist.get_world_size()
    n = torch.tensor([t.size(0)], device=t.device)
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    sizes = [s.item() for s in sizes]
    padded = t.new_zeros(max(sizes), *t.shape[1:])
    padded[:t.size(0)] = t
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([p[:s] for p, s in zip(parts, sizes)])


def auc(score, label):
    order = score.argsort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1, device=order.device)
    pos = label > 0
    n1, n0 = pos.sum(), (~pos).sum()
    return ((ranks[pos].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)).item()


@torch.inference_mode()
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = torch.load("/data/spans/test.pt", map_location="cpu")
    ds = TensorDataset(d["emb"], d["is_answer"])
    loader = DataLoader(Subset(ds, range(rank, len(ds), world)), batch_size=4096)
    net = torch.jit.load("span_scorer.ts", map_location=f"cuda:{local_rank}").eval()
    score, label = [], []
    for x, y in loader:
        score.append(net(x.cuda()).squeeze(1))
        label.append(y.cuda())
    score, label = gather_ragged(torch.cat(score)), gather_ragged(torch.cat(label))
    if rank == 0:
        print(f"AUC over {len(score)} spans: {auc(score, label):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
