# torchrun --nproc_per_node=8 async_reduce_log.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LossLog:
    def __init__(self, every):
        self.every, self.sum, self.n = every, torch.zeros(2, device="cuda"), 0
        self.pending = None

    def add(self, loss, size):
        self.sum[0] += loss.detach() * size
        self.sum[1] += size
        self.n += 1
        if self.n % self.every == 0:
            self.flush()
            buf = self.sum.clone()
            self.sum.zero_()
            self.pending = (dist.reduce(buf, dst=0, async_op=True), buf, self.n)

    def flush(self):
        if self.pending is None:
            return
        work, buf, n = self.pending
        work.wait()
        self.pending = None
        if dist.get_rank() == 0:
            print(f"step {n} loss {(buf[0] / buf[1]).item():.5f}", flush=True)


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    d = torch.load("spectra.pt", map_location="cpu")
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=2)
    net = nn.Sequential(nn.Conv1d(1, 32, 9, stride=2), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU(),
                        nn.AdaptiveAvgPool1d(16), nn.Flatten(), nn.Linear(1024, 3))
    model = DDP(net.cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    log = LossLog(every=25)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            log.add(loss, len(y))
    log.flush()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "spectra_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
