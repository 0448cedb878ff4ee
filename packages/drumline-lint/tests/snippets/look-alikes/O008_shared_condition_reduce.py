import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from denoise.data import Patches
from denoise.model import DnCNN

LOG_EVERY = 100


class Meter:
    def __init__(self, device):
        self.buf = torch.zeros(2, device=device)

    def add(self, loss, n):
        self.buf += torch.stack([loss.detach() * n, torch.tensor(float(n), device=loss.device)])

    def flush(self):
        dist.all_reduce(self.buf)
        value = (self.buf[0] / self.buf[1]).item()
        self.buf.zero_()
        return value


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)
    ds = Patches("/data/bsd")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(DnCNN().to(dev), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    meter, step = Meter(dev), 0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for noisy, clean in loader:
            loss = torch.nn.functional.mse_loss(model(noisy.to(dev)), clean.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.add(loss, len(noisy))
            step += 1
            if step % LOG_EVERY == 0:
                avg = meter.flush()
                if rank == 0:
                    print(step, avg)
        if rank == 0:
            torch.save(model.module.state_dict(), "dncnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
