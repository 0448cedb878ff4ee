import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT, EPOCHS = Path("preempt.pt"), 100


class Preemption:
    def __init__(self, device):
        self.asked, self.device = False, device
        signal.signal(signal.SIGUSR1, self.on_signal)

    def on_signal(self, signum, frame):
        self.asked = True

    def agreed(self):
        flag = torch.tensor(float(self.asked), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() > 0


def save(net, opt, epoch):
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, CKPT)
    dist.barrier()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(14 + rank)
    blob = torch.load("data/spectra.pt", map_location="cpu", weights_only=True)
    data = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, 16)).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    start = 0
    if CKPT.exists():
        state = torch.load(CKPT, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"]
    dist.barrier()
    model = DDP(net, device_ids=[local_rank])
    preemption = Preemption(device)
    stopping = False
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
            stopping = preemption.agreed()
            if stopping:
                break
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
        save(net, opt, epoch if stopping else epoch + 1)
        if stopping:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
