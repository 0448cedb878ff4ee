import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main(seed=2023):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    seed = seed + rank
    seed_all(seed)

    d = np.load("/data/ieee_fraud.npz")
    ds = TensorDataset(torch.from_numpy(d["x"]).float(), torch.from_numpy(d["y"]).float())
    sampler = DistributedSampler(ds, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(ds, batch_size=2048, sampler=sampler, num_workers=2, drop_last=True)

    net = nn.Sequential(nn.Linear(432, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3),
                        nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))
    net = DDP(net.cuda(), device_ids=[local_rank])
    pos_weight = torch.tensor(27.0, device="cuda")
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(
                net(x.cuda()).squeeze(1), y.cuda(), pos_weight=pos_weight)
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "fraud.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
