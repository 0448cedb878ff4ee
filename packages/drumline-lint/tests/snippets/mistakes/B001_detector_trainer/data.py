from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CocoDetection
from torchvision.transforms.functional import to_tensor


def collate(batch):
    return tuple(zip(*batch))


def to_target(image, anns):
    import torch

    boxes = torch.tensor([a["bbox"] for a in anns], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([a["category_id"] for a in anns], dtype=torch.int64)
    return to_tensor(image), {"boxes": boxes, "labels": labels}


def build_train_loader(cfg):
    ds = CocoDetection(cfg.image_dir, cfg.ann_file, transforms=to_target)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(
        ds,
        batch_size=cfg.batch_size,
        sampler=sampler,
        num_workers=cfg.workers,
        collate_fn=collate,
        pin_memory=True,
    )
