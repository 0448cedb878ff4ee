import os
import shutil
import tarfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from aerial.data import TileFolder
from aerial.model import FPN

SRC = "/nfs/datasets/tiles.tar"
TMP = os.environ.get("TMPDIR", "/tmp")


def stage_data(local_rank):
    dst = os.path.join(TMP, "tiles")
    if local_rank == 0:
        shutil.rmtree(dst, ignore_errors=True)
        os.makedirs(dst)
        with tarfile.open(SRC) as t:
            t.extractall(dst)
    dist.barrier()
    return dst


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    ds = TileFolder(stage_data(local_rank))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(FPN(7).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ce = torch.nn.CrossEntropyLoss(ignore_index=255)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = ce(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "/nfs/ckpt/fpn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
