"""Masked-image pretraining.

Launched on four 8-GPU hosts with

    torchrun --nnodes=4 --nproc_per_node=8 --node_rank=$NODE_RANK \
        --master_addr=$HEAD --master_port=29400 pretrain.py
"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from mim.datasets import WebImages
from mim.models import mae_vit_large
from mim.schedule import cosine_lr


def init():
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank, dist.get_world_size()


def run(epochs=400, per_gpu=64, base_lr=1.5e-4):
    rank, world = init()
    model = mae_vit_large(mask_ratio=0.75).cuda()
    model = DistributedDataParallel(model, device_ids=[rank])
    lr = base_lr * per_gpu * world / 256
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)

    ds = WebImages("/fsx/images")
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(ds, batch_size=per_gpu, sampler=sampler, num_workers=10,
                        pin_memory=True, drop_last=True)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for it, imgs in enumerate(loader):
            cosine_lr(opt, lr, epoch + it / len(loader), epochs, warmup=40)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss, _, _ = model(imgs.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            if epoch % 20 == 0:
                torch.save(model.module.state_dict(), f"/fsx/ckpt/mae_{epoch}.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    run()
