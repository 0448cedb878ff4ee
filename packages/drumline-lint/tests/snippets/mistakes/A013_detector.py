"""torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD A013_detector.py"""
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def collate(batch):
    return tuple(zip(*batch))


class Boxes(torch.utils.data.Dataset):
    def __init__(self, listing):
        self.entries = torch.load(listing, map_location="cpu", weights_only=True)

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        e = self.entries[i]
        image = torchvision.io.read_image(e["file"]).float() / 255
        return image, {"boxes": e["boxes"], "labels": e["labels"]}


def init_distributed():
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank, torch.device("cuda", rank)


def main():
    rank, device = init_distributed()
    torch.manual_seed(1 + rank)
    ds = Boxes("coco_subset.pt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=2, sampler=sampler, collate_fn=collate, num_workers=4, drop_last=True)
    net = torchvision.models.detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    net = DistributedDataParallel(net.to(device), device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        net.train()
        for images, targets in loader:
            images = [im.to(device) for im in images]
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            loss = sum(net(images, targets).values())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save({"model": net.module.state_dict(), "epoch": epoch}, "fcos.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
