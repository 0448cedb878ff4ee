import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import transforms as T


def build_model(classes):
    m = torchvision.models.resnet50(weights=None)
    m.fc = nn.Linear(m.fc.in_features, classes)
    return nn.SyncBatchNorm.convert_sync_batchnorm(m)


def build_loader(folder, batch_size):
    tf = T.Compose([T.RandomResizedCrop(448), T.RandomHorizontalFlip(), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder(folder, tf)
    return ds, DataLoader(ds, batch_size=batch_size, shuffle=True, num_workers=8,
                          pin_memory=True, drop_last=True)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    ds, loader = build_loader("/mnt/fundus/train", 24)
    model = build_model(len(ds.classes)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    sched = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)
    ce = nn.CrossEntropyLoss()

    for epoch in range(60):
        model.train()
        for img, grade in loader:
            img = img.cuda(non_blocking=True)
            grade = grade.cuda(non_blocking=True)
            loss = ce(model(img), grade)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "retina_last.pt")
            print("epoch", epoch, "done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
