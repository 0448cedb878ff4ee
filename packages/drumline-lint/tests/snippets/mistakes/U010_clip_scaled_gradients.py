import os

import torch
import torch.distributed as dist
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from det.anchors import AnchorLoss
from det.data import VOCDetection, detection_collate
from det.retina import RetinaNet


def train_epoch(epoch, model, loss_fn, loader, optimizer, scaler, device, max_norm):
    model.train()
    for i, (images, targets) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        targets = [t.to(device, non_blocking=True) for t in targets]
        with autocast():
            cls_logits, boxes = model(images)
            loss = loss_fn(cls_logits, boxes, targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        if i % 20 == 0 and dist.get_rank() == 0:
            print(epoch, i, round(loss.item(), 4))


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)

    ds = VOCDetection("/data/voc", "trainval")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=6,
                        collate_fn=detection_collate, drop_last=True)
    model = DDP(RetinaNet(num_classes=20).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22], gamma=0.1)
    scaler = GradScaler()

    for epoch in range(26):
        sampler.set_epoch(epoch)
        train_epoch(epoch, model, AnchorLoss(), loader, optimizer, scaler, device, max_norm=0.1)
        scheduler.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "scaler": scaler.state_dict()}, "retina.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
