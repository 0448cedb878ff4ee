import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def in_order(local, n):
    """Undo the round-robin of DistributedSampler(shuffle=False) and drop its padding."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts, dim=1).flatten(0, 1)[:n]


class Grader(nn.Module):
    def __init__(self, d=768, grades=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 256), nn.ReLU(), nn.Linear(256, grades))

    def forward(self, x):
        return self.net(x)


@torch.inference_mode()
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    d = torch.load("essays_test.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["emb"], d["grade"])
    loader = DataLoader(ds, 512, sampler=DistributedSampler(ds, shuffle=False))
    net = Grader()
    net.load_state_dict(torch.load("grader.pt", map_location="cpu", weights_only=True))
    net.to(device).eval()
    pred, gold = [], []
    for x, y in loader:
        pred.append(net(x.to(device)).argmax(1))
        gold.append(y.to(device))
    pred = in_order(torch.cat(pred), len(ds))
    gold = in_order(torch.cat(gold), len(ds))
    if dist.get_rank() == 0:
        exact = (pred == gold).double().mean().item()
        near = ((pred - gold).abs() <= 1).double().mean().item()
        print(f"exact {exact:.4f} within one {near:.4f} on {len(gold)} essays")
        torch.save(pred.cpu(), "essay_predictions.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
