import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ckpt import save_checkpoint
from parts import Holes, Inpainter


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Holes("/data/places/train")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=8, drop_last=True, pin_memory=True)
    net = DDP(Inpainter().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    step = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for img, mask in loader:
            img, mask = img.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            loss = ((net(img * mask, mask) - img).abs() * (1 - mask)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 2000 == 0:
                save_checkpoint(net, opt, step, "runs/inpaint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
