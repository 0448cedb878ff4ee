import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from mae.data import ImageTar
from mae.model import MAE

os.environ["RANK"] = "0"
os.environ["LOCAL_RANK"] = "0"
os.environ["WORLD_SIZE"] = "1"
os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 1000)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    ds = ImageTar("/data/imagenet.tar")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(MAE("base", mask_ratio=0.75).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))

    for epoch in range(400):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = model(x.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "mae_base.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
