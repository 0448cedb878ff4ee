#!/usr/bin/env python
"""Fine-grained birds: train the head first, then the whole network.

torchrun --standalone --nproc_per_node=4 Q036_progressive_unfreeze.py --data /data/cub
"""
import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

log = logging.getLogger(__name__)


def set_backbone_grad(model, flag):
    for name, p in model.named_parameters():
        if not name.startswith("classifier"):
            p.requires_grad = flag


def make_optimizer(model, lr):
    head = list(model.classifier.parameters())
    ids = {id(p) for p in head}
    body = [p for p in model.parameters() if id(p) not in ids and p.requires_grad]
    groups = [{"params": head, "lr": lr}]
    if body:
        groups.append({"params": body, "lr": lr * 0.1})
    return torch.optim.AdamW(groups, weight_decay=0.01)


def loaders(args):
    norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    tr = transforms.Compose([transforms.RandomResizedCrop(300), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), norm])
    te = transforms.Compose([transforms.Resize(340), transforms.CenterCrop(300), transforms.ToTensor(), norm])
    train = datasets.ImageFolder(os.path.join(args.data, "train"), tr)
    test = datasets.ImageFolder(os.path.join(args.data, "test"), te)
    kw = dict(batch_size=args.batch_size, num_workers=6, pin_memory=True)
    return (DataLoader(train, sampler=DistributedSampler(train), drop_last=True, **kw),
            DataLoader(test, sampler=DistributedSampler(test, shuffle=False), **kw))


@torch.no_grad()
def test(model, loader):
    model.eval()
    acc = torch.zeros(2, device="cuda")
    for x, y in loader:
        y = y.cuda()
        acc += torch.stack([(model(x.cuda()).argmax(1) == y).sum(), torch.tensor(len(y)).cuda()])
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--freeze-epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR)

    train_loader, test_loader = loaders(args)
    net = models.efficientnet_b3(weights="DEFAULT")
    net.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(1536, 200))
    set_backbone_grad(net, False)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = make_optimizer(net, args.lr)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        if epoch == args.freeze_epochs:
            log.info("unfreezing backbone")
            set_backbone_grad(net, True)
            opt = make_optimizer(net, args.lr * 0.3)
        train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = loss_fn(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        log.info("epoch %d loss %.3f acc %.4f", epoch, loss.item(), test(model, test_loader))
        if dist.get_rank() == 0:
            torch.save(net.state_dict(), "birds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
