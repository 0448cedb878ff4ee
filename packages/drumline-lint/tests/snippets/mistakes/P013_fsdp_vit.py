import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import vit_l_16
from torchvision.models.vision_transformer import EncoderBlock

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def parse():
    ap = argparse.ArgumentParser("vit-fsdp")
    ap.add_argument("--imagenet", default="/data/imagenet/train")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--wd", type=float, default=0.3)
    ap.add_argument("--out", default="vit_l.pt")
    return ap.parse_args()


def get_loader(args):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandAugment(), transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    ds = datasets.ImageFolder(args.imagenet, tf)
    sampler = DistributedSampler(ds, shuffle=True)
    return DataLoader(ds, args.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True), sampler


def save(model, path, rank):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, path)


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)

    loader, sampler = get_loader(args)
    model = vit_l_16(weights=None, num_classes=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wd, betas=(0.9, 0.95))
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderBlock}),
        mixed_precision=BF16,
        device_id=local_rank,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = loss_fn(model(x), y)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and i % 100 == 0:
                print(f"epoch {epoch} iter {i} loss {loss.item():.3f}")
        scheduler.step()
        if (epoch + 1) % 10 == 0:
            save(model, args.out, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
