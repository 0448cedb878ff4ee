import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks import Reshuffle, SaveWeights
from loop import Loop


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/adni.pt", map_location="cpu")
    ds = TensorDataset(d["vol"].float(), d["dx"])
    loader = DataLoader(ds, 4, sampler=DistributedSampler(ds, shuffle=True, drop_last=True),
                        num_workers=4, drop_last=True)
    net = nn.Sequential(nn.Conv3d(1, 16, 3, 2), nn.ReLU(), nn.Conv3d(16, 32, 3, 2), nn.ReLU(),
                        nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(256, 3))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    Loop(net, opt, loader, [Reshuffle(loader), SaveWeights("adni_net.pt")]).run(60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
