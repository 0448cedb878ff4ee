import argparse
import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder


def set_backbone(model, trainable):
    head = {id(p) for p in model.get_classifier().parameters()}
    for p in model.parameters():
        if id(p) not in head:
            p.requires_grad = trainable


def build_loader(root, model, batch):
    cfg = timm.data.resolve_model_data_config(model)
    data = ImageFolder(root, timm.data.create_transform(**cfg, is_training=True))
    sampler = DistributedSampler(data)
    return DataLoader(data, batch, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True), sampler


def run_epochs(model, loader, sampler, epochs, lr, device, first):
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(first, first + epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--arch", default="convnext_tiny")
    ap.add_argument("--classes", type=int, default=102)
    ap.add_argument("--warm", type=int, default=3)
    ap.add_argument("--full", type=int, default=20)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(9 + dist.get_rank())

    net = timm.create_model(args.arch, pretrained=True, num_classes=args.classes).to(device)
    loader, sampler = build_loader(args.root, net, 64)
    model = DDP(net, device_ids=[local_rank])
    set_backbone(net, False)
    run_epochs(model, loader, sampler, args.warm, 1e-3, device, 0)
    set_backbone(net, True)
    run_epochs(model, loader, sampler, args.full, 1e-4, device, args.warm)
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "finetuned.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
