import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms as T
from torchvision.datasets import ImageFolder

from dist_utils import is_main, setup
from engine import evaluate, train_epoch


def main(root):
    rank, local_rank = setup()
    device = torch.device("cuda", local_rank)
    train_tf = T.Compose([T.Resize((256, 128)), T.RandomHorizontalFlip(), T.ToTensor(), T.RandomErasing()])
    test_tf = T.Compose([T.Resize((256, 128)), T.ToTensor()])
    train_set = ImageFolder(f"{root}/train", train_tf)
    gallery = ImageFolder(f"{root}/gallery", test_tf)

    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, 64, sampler=sampler, num_workers=8, drop_last=True)
    gallery_loader = DataLoader(gallery, 128, sampler=DistributedSampler(gallery, shuffle=False), num_workers=4)

    model = models.resnet50(num_classes=len(train_set.classes)).to(device)
    model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=3.5e-4, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40)

    for epoch in range(120):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, device)
        scheduler.step()
        if is_main() and epoch % 10 == 9:
            rank1 = evaluate(model.module, gallery_loader, device)
            print(f"epoch {epoch} loss {loss:.3f} rank-1 {rank1:.3f}", flush=True)
            torch.save(model.module.state_dict(), "reid.pth")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
