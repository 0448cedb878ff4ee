import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models as models
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

BATCH, EPOCHS, DIM = 96, 20, 512


class ArcFace(nn.Module):
    def __init__(self, n_id, s=64.0, m=0.5):
        super().__init__()
        self.backbone = models.resnet50(num_classes=DIM)
        self.weight = nn.Parameter(torch.randn(n_id, DIM) * 0.01)
        self.s, self.m = s, m

    def embed(self, x):
        return F.normalize(self.backbone(x))

    def forward(self, x, y):
        cos = F.linear(self.embed(x), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        theta = cos.acos()
        hot = F.one_hot(y, cos.size(1)).bool()
        return self.s * torch.where(hot, (theta + self.m).cos(), cos)


def transform(train):
    ops = [T.Resize((112, 112))]
    if train:
        ops.append(T.RandomHorizontalFlip())
    return T.Compose(ops + [T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)])


@torch.no_grad()
def rank1_accuracy(net, ds, rank, world):
    """leave-one-out rank-1 identification over the whole validation folder"""
    net.eval()
    mine = Subset(ds, range(rank, len(ds), world))
    embs, ids = [], []
    for x, y in DataLoader(mine, 256, num_workers=4):
        embs.append(net.embed(x.cuda()))
        ids.append(y.cuda())
    embs, ids = torch.cat(embs), torch.cat(ids)

    all_embs = [torch.empty_like(embs) for _ in range(world)]
    all_ids = [torch.empty_like(ids) for _ in range(world)]
    dist.all_gather(all_embs, embs)
    dist.all_gather(all_ids, ids)
    gallery, labels = torch.cat(all_embs), torch.cat(all_ids)

    hits = 0
    for q, y in zip(gallery.split(1024), labels.split(1024)):
        sim = q @ gallery.t()
        sim[sim > 0.99999] = -1
        hits += (labels[sim.argmax(1)] == y).sum().item()
    return hits / len(labels)


def main(root):
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    train_ds = ImageFolder(f"{root}/train", transform(True))
    val_ds = ImageFolder(f"{root}/val", transform(False))
    sampler = DistributedSampler(train_ds, drop_last=True)
    loader = DataLoader(train_ds, BATCH, sampler=sampler, num_workers=8, drop_last=True, pin_memory=True)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(ArcFace(len(train_ds.classes))).cuda()
    ddp = DistributedDataParallel(net, device_ids=[local_rank])
    opt = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [10, 16], 0.1)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            y = y.cuda(non_blocking=True)
            loss = F.cross_entropy(ddp(x.cuda(non_blocking=True), y), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        acc = rank1_accuracy(net, val_ds, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} rank-1 {acc:.4f}")
            torch.save(net.state_dict(), "arcface.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])  # torchrun --nproc_per_node=8
