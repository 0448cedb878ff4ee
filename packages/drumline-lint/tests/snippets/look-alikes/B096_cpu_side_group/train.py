import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from counters import HostCounter
from data import ArrayDataset


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(60 + dist.get_rank())
    counter = HostCounter()
    data = ArrayDataset("data/gesture", "train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 64, sampler=sampler, num_workers=2, drop_last=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6 * 200, 256), nn.ReLU(), nn.Linear(256, 12)).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            y = y.to(device)
            logits = model(x.to(device))
            loss = F.cross_entropy(logits, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            counter.add((logits.argmax(1) == y).sum().item(), len(y))
        acc = counter.total()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train acc {acc:.4f}")
            torch.save(net.state_dict(), "gesture.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
