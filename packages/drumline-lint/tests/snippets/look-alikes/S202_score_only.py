"""Score a frozen model on a big image folder, one part per GPU.
torchrun --nproc_per_node=8 score_only.py --images /data/lake --weights clf.pt
"""
import argparse
import csv
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms as T
from torchvision.datasets.folder import default_loader


class Files(Dataset):
    tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.tf(default_loader(self.paths[i])), i


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", required=True)
    ap.add_argument("--weights", required=True)
    ap.add_argument("--out", default="scores")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.makedirs(args.out, exist_ok=True)

    paths = sorted(e.path for e in os.scandir(args.images) if e.name.endswith(".jpg"))[rank::world]
    loader = DataLoader(Files(paths), batch_size=256, shuffle=False, num_workers=8)
    model = models.resnet50(num_classes=12)
    model.load_state_dict(torch.load(args.weights, map_location="cpu"))
    model = model.cuda().eval()

    with open(os.path.join(args.out, f"part-{rank:03d}.csv"), "w", newline="") as fh, torch.inference_mode():
        w = csv.writer(fh)
        for x, idx in loader:
            p = model(x.cuda()).softmax(1)
            conf, cls = p.max(1)
            for i, c, s in zip(idx.tolist(), cls.tolist(), conf.tolist()):
                w.writerow([paths[i], c, f"{s:.4f}"])
    dist.barrier()
    if rank == 0:
        print("parts:", sorted(os.listdir(args.out)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
