"""Fine-tune ViT-H with FSDP on a plant disease set."""
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from timm import create_model
from timm.models.vision_transformer import Block
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

EPOCHS, BATCH, LR = 30, 16, 1e-4


def loaders(root):
    norm = T.Normalize((0.5,) * 3, (0.5,) * 3)
    train = ImageFolder(f"{root}/train", T.Compose([T.RandomResizedCrop(224), T.ToTensor(), norm]))
    val = ImageFolder(f"{root}/val", T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    train_loader = DataLoader(train, BATCH, sampler=DistributedSampler(train, shuffle=True), num_workers=6)
    val_loader = DataLoader(val, BATCH, sampler=DistributedSampler(val, shuffle=False), num_workers=4)
    return train_loader, val_loader, len(train.classes)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hit = torch.zeros(2, device="cuda")
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        hit += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(y.numel(), device="cuda")])
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()
    train_loader, val_loader, classes = loaders("/data/plantvillage")
    torch.manual_seed(0)

    model = create_model("vit_huge_patch14_224", num_classes=classes)
    model = FSDP(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    for epoch in range(EPOCHS):
        train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
        scheduler.step()
        acc = accuracy(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} acc {acc:.4f}", flush=True)

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, "vit_h_plants.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
