"""U-Net segmentation that can be restarted after preemption."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lungs.data import CTSlices
from lungs.unet import UNet

STATE = "/ckpt/lungs/state.pt"
EPOCHS = 80


def save_state(model, opt, epoch):
    tmp = STATE + ".part"
    torch.save({"net": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, STATE)


def dice_loss(logits, mask, eps=1.0):
    p = logits.sigmoid().flatten(1)
    t = mask.flatten(1)
    return (1 - (2 * (p * t).sum(1) + eps) / (p.sum(1) + t.sum(1) + eps)).mean()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    net = UNet(1, 1, base=48).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    start = 0
    if rank == 0 and os.path.exists(STATE):
        state = torch.load(STATE, map_location=device)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"] + 1
        print(f"resuming at epoch {start}", flush=True)
    dist.barrier()
    model = DDP(net, device_ids=[local])  # sends rank 0's weights to the others

    data = CTSlices("/data/ct", split="train")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=6, drop_last=True)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for img, mask in loader:
            img, mask = img.to(device), mask.to(device)
            logits = model(img)
            loss = bce(logits, mask) + dice_loss(logits, mask)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            save_state(model.module, opt, epoch)
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
