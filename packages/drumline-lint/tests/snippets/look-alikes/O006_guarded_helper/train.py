import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ckpt import load_checkpoint, save_checkpoint
from hands.data import FreiHand
from hands.model import HandNet

CKPT = "/shared/handnet.pt"


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    ds = FreiHand("/data/freihand")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    net = HandNet().to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    if os.path.exists(CKPT):
        load_checkpoint(CKPT, device, model=net, opt=opt)
    dist.barrier()
    for epoch in range(80):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.smooth_l1_loss(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        save_checkpoint(CKPT, model=net, opt=opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
