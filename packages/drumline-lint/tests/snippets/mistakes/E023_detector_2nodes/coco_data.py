import os

import torch
from torch.utils.data import Dataset
from torchvision.datasets import CocoDetection
from torchvision.transforms.functional import to_tensor


class CocoBoxes(Dataset):
    def __init__(self, root, split):
        self.ds = CocoDetection(os.path.join(root, split),
                                os.path.join(root, "annotations", f"instances_{split}.json"))
        coco = self.ds.coco
        self.keep = [k for k, i in enumerate(self.ds.ids)
                     if any(a["bbox"][2] > 1 and a["bbox"][3] > 1 for a in coco.imgToAnns[i])]

    def __len__(self):
        return len(self.keep)

    def __getitem__(self, k):
        img, anns = self.ds[self.keep[k]]
        anns = [a for a in anns if a["bbox"][2] > 1 and a["bbox"][3] > 1]
        b = torch.tensor([a["bbox"] for a in anns], dtype=torch.float32)
        b[:, 2:] += b[:, :2]
        return to_tensor(img.convert("RGB")), {"boxes": b, "labels": torch.tensor([a["category_id"] for a in anns])}


def collate(batch):
    return tuple(zip(*batch))
