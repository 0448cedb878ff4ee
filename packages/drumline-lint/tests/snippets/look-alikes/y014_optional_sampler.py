"""Runs as `python hand_pose.py` on one GPU or under torchrun on several."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from hands import FreiHand, HandNet

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DISTRIBUTED = WORLD_SIZE > 1


def main():
    torch.cuda.set_device(LOCAL_RANK)
    rank = 0
    if DISTRIBUTED:
        dist.init_process_group("nccl")
        rank = dist.get_rank()

    data = FreiHand("/data/freihand")
    sampler = DistributedSampler(data, shuffle=True) if DISTRIBUTED else None
    loader = DataLoader(data, batch_size=64, shuffle=(sampler is None), sampler=sampler,
                        num_workers=8, pin_memory=True, drop_last=True)

    net = HandNet(joints=21).cuda()
    model = DDP(net, device_ids=[LOCAL_RANK]) if DISTRIBUTED else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for epoch in range(60):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for image, joints in loader:
            image, joints = image.cuda(non_blocking=True), joints.cuda(non_blocking=True)
            loss = F.smooth_l1_loss(model(image), joints)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.5f}", flush=True)
            torch.save(net.state_dict(), "hand_pose.pt")

    if DISTRIBUTED:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
