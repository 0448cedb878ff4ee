import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from seg.cityscapes import Cityscapes, colorize
from seg.deeplab import DeepLabV3Plus


def log_preview(writer, net, batch, step):
    with torch.no_grad():
        pred = net(batch).argmax(1)
    writer.add_images("preview/input", batch, step)
    writer.add_images("preview/mask", colorize(pred), step)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    net = DeepLabV3Plus(backbone="resnet101", num_classes=19)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    ce = nn.CrossEntropyLoss(ignore_index=255)

    train_set = Cityscapes("/data/cityscapes", "train", crop=768)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=2, sampler=sampler, num_workers=4, pin_memory=True)
    writer = SummaryWriter("runs/deeplab") if rank == 0 else None

    step = 0
    for epoch in range(240):
        sampler.set_epoch(epoch)
        ddp.train()
        for img, mask in loader:
            img, mask = img.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            loss = ce(ddp(img), mask)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            if rank == 0 and step % 200 == 0:
                writer.add_scalar("train/loss", loss.item(), step)
                log_preview(writer, ddp.module, img, step)
        if rank == 0:
            torch.save(net.state_dict(), "runs/deeplab/last.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
