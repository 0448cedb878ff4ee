"""Extract features on all GPUs and run a kNN probe."""
import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def concat_all_gather(x):
    buf = [torch.empty_like(x)] * dist.get_world_size()
    dist.all_gather(buf, x.contiguous())
    return torch.cat(buf, dim=0)


@torch.inference_mode()
def extract(model, loader, device):
    feats, labels = [], []
    for x, y in loader:
        feats.append(torch.nn.functional.normalize(model(x.to(device)), dim=1))
        labels.append(y.to(device))
    return concat_all_gather(torch.cat(feats)), concat_all_gather(torch.cat(labels))


@torch.inference_mode()
def knn(bank, bank_y, query, query_y, k=20):
    hits = 0
    for q, y in zip(query.split(1024), query_y.split(1024)):
        nearest = (q @ bank.t()).topk(k, dim=1).indices
        hits += (bank_y[nearest].mode(dim=1).values == y).sum().item()
    return hits / len(query)


def make_loader(root, split, bs):
    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    ds = datasets.ImageFolder(os.path.join(root, split), tf)
    return DataLoader(ds, bs, sampler=DistributedSampler(ds, shuffle=False), num_workers=8)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--weights", required=True)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    model = torchvision.models.resnet50()
    model.fc = torch.nn.Identity()
    model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    model.to(device).eval()
    bank, bank_y = extract(model, make_loader(args.root, "train", 256), device)
    query, query_y = extract(model, make_loader(args.root, "val", 256), device)
    if dist.get_rank() == 0:
        print(f"kNN top-1 {knn(bank, bank_y, query, query_y):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
