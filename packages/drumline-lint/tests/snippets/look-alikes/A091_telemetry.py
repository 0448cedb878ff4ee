import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def gather_ragged(rows):
    world = dist.get_world_size()
    n = torch.tensor([rows.size(0)], device=rows.device)
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    sizes = [int(s) for s in sizes]
    padded = rows.new_zeros(max(sizes), rows.size(1))
    padded[:rows.size(0)] = rows
    buckets = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(buckets, padded)
    return torch.cat([b[:s] for b, s in zip(buckets, sizes)])


class Anomaly(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Linear(16, d))

    def forward(self, x):
        return (self.net(x) - x).pow(2).mean(-1)


@torch.inference_mode()
def main(threshold=0.8):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    d = torch.load("telemetry.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["id"], d["x"])
    model = Anomaly()
    model.load_state_dict(torch.load("anomaly.pt", map_location="cpu", weights_only=True))
    model.to(device).eval()
    found = [torch.empty(0, 2, dtype=torch.float64, device=device)]
    for ids, x in DataLoader(Subset(ds, range(rank, len(ds), world)), 4096):
        score = model(x.to(device))
        keep = score > threshold
        found.append(torch.stack([ids.to(device)[keep].double(), score[keep].double()], dim=1))
    table = gather_ragged(torch.cat(found))
    if rank == 0:
        torch.save(table.cpu(), "alarms.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
