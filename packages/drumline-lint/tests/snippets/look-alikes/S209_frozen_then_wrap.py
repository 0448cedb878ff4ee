"""Linear probe first, then full fine-tuning.  torchrun --nproc_per_node=4 frozen_then_wrap.py"""
import os

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import Food101
from torchvision import transforms as T


def set_trainable(net, head_only):
    for p in net.parameters():
        p.requires_grad_(not head_only)
    for p in net.get_classifier().parameters():
        p.requires_grad_(True)


def phase(net, loader, gpu, epochs, first_epoch, lr):
    model = DDP(net, device_ids=[gpu])
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(first_epoch, first_epoch + epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    ds = Food101("/data", split="train", transform=tf)
    loader = DataLoader(ds, 64, sampler=DistributedSampler(ds), num_workers=8, drop_last=True)

    net = timm.create_model("resnet50", pretrained=True, num_classes=101)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    set_trainable(net, head_only=True)
    phase(net, loader, gpu, epochs=3, first_epoch=0, lr=1e-3)
    set_trainable(net, head_only=False)
    phase(net, loader, gpu, epochs=12, first_epoch=3, lr=1e-4)

    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "food.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
