# Embed a photo gallery on all GPUs of one machine: torchrun --standalone --nproc_per_node=4 embed_gallery.py
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def collect(local):
    world = dist.get_world_size()
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local)
    return torch.cat(parts)


@torch.inference_mode()
def embed(net, loader):
    out = []
    for images, _ in loader:
        out.append(net(images.cuda(non_blocking=True)))
    return torch.cat(out)


def keep_sharp(dataset, indices, threshold=0.02):
    chosen = []
    for i in indices:
        image, _ = dataset[i]
        if image.diff(dim=-1).var() > threshold:
            chosen.append(i)
    return chosen


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tf = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    gallery = datasets.ImageFolder("/data/gallery", tf)
    mine = keep_sharp(gallery, range(rank, len(gallery), world))
    loader = DataLoader(Subset(gallery, mine), batch_size=256, num_workers=8, pin_memory=True)

    net = models.resnet50()
    net.load_state_dict(torch.load("/models/resnet50.pt", map_location="cpu"))
    net.fc = torch.nn.Identity()
    vectors = collect(embed(net.cuda().eval(), loader))
    ids = [None] * world
    dist.all_gather_object(ids, mine)
    if rank == 0:
        torch.save({"ids": sum(ids, []), "vectors": vectors.cpu()}, "gallery.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
