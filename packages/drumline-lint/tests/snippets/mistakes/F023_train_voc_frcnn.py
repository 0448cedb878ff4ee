import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import VOCDetection
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2
from torchvision.ops import box_iou
from torchvision.transforms.functional import to_tensor

CLASSES = ("aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse "
           "motorbike person pottedplant sheep sofa train tvmonitor").split()


def transform(image, annotation):
    boxes, labels = [], []
    for obj in annotation["annotation"]["object"]:
        b = obj["bndbox"]
        boxes.append([float(b[k]) for k in ("xmin", "ymin", "xmax", "ymax")])
        labels.append(CLASSES.index(obj["name"]) + 1)
    return to_tensor(image), {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}


def collate(batch):
    return tuple(zip(*batch))


@torch.no_grad()
def recall_at_50(model, loader, device):
    model.eval()
    hits, total = 0, 0
    for images, targets in loader:
        outputs = model([im.to(device) for im in images])
        for out, tgt in zip(outputs, targets):
            total += len(tgt["boxes"])
            if len(out["boxes"]):
                iou = box_iou(tgt["boxes"].to(device), out["boxes"])
                hits += int((iou.max(dim=1).values > 0.5).sum())
    stats = torch.tensor([hits, total], dtype=torch.float64)
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[1].clamp(min=1)).item()


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_set = VOCDetection("/data/voc", "2012", "train", transforms=transform)
    val_set = VOCDetection("/data/voc", "2012", "val", transforms=transform)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, 4, sampler=train_sampler, num_workers=4, collate_fn=collate)
    val_loader = DataLoader(val_set, 4, sampler=DistributedSampler(val_set, shuffle=False),
                            num_workers=4, collate_fn=collate)

    model = fasterrcnn_resnet50_fpn_v2(weights=None, num_classes=len(CLASSES) + 1).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    for epoch in range(26):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, targets in train_loader:
            images = [im.to(device) for im in images]
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        recall = recall_at_50(model, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} recall@0.5 {recall:.3f}", flush=True)
            torch.save(model.module.state_dict(), "frcnn_voc.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
