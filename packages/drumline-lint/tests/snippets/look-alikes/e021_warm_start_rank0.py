import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def load_moco(model, path):
    state = torch.load(path, map_location="cpu")["state_dict"]
    prefix = "module.encoder_q."
    state = {k[len(prefix):]: v for k, v in state.items()
             if k.startswith(prefix) and not k.startswith(prefix + "fc")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) == {"fc.weight", "fc.bias"} and not unexpected
    print(f"loaded {len(state)} tensors from {path}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--moco", required=True, help="only has to be readable on the first node")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--bs", type=int, default=64)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(),
                             transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    ds = ImageFolder(args.data, tf)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = models.resnet50(num_classes=len(ds.classes))
    if rank == 0:
        load_moco(model, args.moco)
    model = DDP(model.cuda(), device_ids=[local])

    opt = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [60, 80], 0.1)
    ce = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = ce(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(epoch, f"{loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), "finetuned.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
