import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from rundir import new_run


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    folder = new_run("runs")
    board = SummaryWriter(folder) if rank == 0 else None
    d = torch.load("/data/eeg.pt", map_location="cpu")
    ds = TensorDataset(d["eeg"].float(), d["stage"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=2, drop_last=True)
    net = nn.Sequential(nn.Conv1d(4, 64, 25, 5), nn.ReLU(), nn.Conv1d(64, 128, 9, 3), nn.ReLU(),
                        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for eeg, stage in loader:
            loss = nn.functional.cross_entropy(net(eeg.cuda()), stage.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if board is not None:
            board.add_scalar("loss", total.item() / len(loader) / dist.get_world_size(), epoch)
            torch.save(net.module.state_dict(), f"{folder}/net.pt")
    if board is not None:
        board.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
