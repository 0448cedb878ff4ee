import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from planner import Planner


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    d = torch.load("drives.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["scene"], d["path"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    model = DDP(Planner().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(80):
        sampler.set_epoch(epoch)
        for scene, path in loader:
            loss = F.smooth_l1_loss(model(scene.to(device)), path.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "planner.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
