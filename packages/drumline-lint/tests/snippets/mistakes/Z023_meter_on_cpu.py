import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from videonet import ClipFolder, SlowFast


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        totals = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        self.sum, self.count = totals.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)

    clips = ClipFolder("/data/kinetics/train")
    sampler = DistributedSampler(clips)
    loader = DataLoader(clips, batch_size=8, sampler=sampler, num_workers=10, pin_memory=True)
    model = SlowFast(num_classes=400)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        meter, start = AverageMeter(), time.time()
        for video, label in loader:
            video, label = video.to(device, non_blocking=True), label.to(device, non_blocking=True)
            loss = F.cross_entropy(model(video), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), label.numel())
        meter.all_reduce()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {meter.avg:.4f} in {time.time() - start:.0f} s", flush=True)
            torch.save(model.module.state_dict(), "slowfast.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
