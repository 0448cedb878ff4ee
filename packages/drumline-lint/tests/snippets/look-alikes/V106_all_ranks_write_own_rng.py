import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from medseg.data import VolumeDataset
from medseg.unet import UNet3D


def save(folder, model, opt, epoch):
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}, folder / f"rng_{rank}.pt")
    dist.barrier()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch},
                   folder / "model.tmp")
        os.replace(folder / "model.tmp", folder / "model.pt")


def restore(folder, model, opt):
    state = torch.load(folder / "model.pt", map_location="cpu")
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    rng = torch.load(folder / f"rng_{dist.get_rank()}.pt", map_location="cpu")
    torch.set_rng_state(rng["cpu"])
    torch.cuda.set_rng_state(rng["cuda"])
    return state["epoch"] + 1


def main(root="/gpfs/medseg", epochs=300):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    base = Path(root) / "runs" / "unet3d"
    train_set = VolumeDataset(root, "train")
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 2, sampler=sampler, num_workers=6)
    model = DDP(UNet3D(1, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = sorted(base.glob("epoch_*/model.pt"))
    start = restore(done[-1].parent, model, opt) if done else 0
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        for vol, mask in loader:
            loss = F.binary_cross_entropy_with_logits(model(vol.cuda()), mask.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        save(base / f"epoch_{epoch:04d}", model, opt, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
