import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def embedder(path, device):
    net = models.resnet34(weights=None)
    net.fc = torch.nn.Linear(512, 256)
    net.load_state_dict(torch.load(path, map_location=device))
    return net.to(device).eval()


@torch.inference_mode()
def embed(net, loader, device):
    return torch.cat([F.normalize(net(x.to(device)), dim=1) for x, _ in loader])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    tf = transforms.Compose([transforms.Resize((160, 160)), transforms.ToTensor()])
    gallery = datasets.ImageFolder("/data/faces/gallery", tf)

    per_rank = math.ceil(len(gallery) / world)
    start, stop = rank * per_rank, min((rank + 1) * per_rank, len(gallery))
    loader = DataLoader(Subset(gallery, range(start, stop)), batch_size=256, num_workers=4)

    net = embedder("faces34.pt", device)
    local = embed(net, loader, device)
    table = torch.empty(world * local.size(0), local.size(1), device=device)
    dist.all_gather_into_tensor(table, local)
    if rank == 0:
        torch.save({"emb": table.cpu(), "label": gallery.targets}, "gallery.pt")
        print("stored", table.size(0), "vectors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
