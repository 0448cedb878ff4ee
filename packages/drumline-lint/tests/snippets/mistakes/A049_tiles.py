import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Tiles(Dataset):
    def __init__(self, path, rank, world_size):
        blob = torch.load(path, map_location="cpu", weights_only=True)
        self.tiles = blob["tiles"][rank::world_size]
        self.ids = blob["ids"][rank::world_size]

    def __len__(self):
        return len(self.tiles)

    def __getitem__(self, i):
        return self.tiles[i].float() / 255, self.ids[i]


class TinyDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 32, 5, 4, 2), nn.ReLU(), nn.Conv2d(32, 5, 1))

    def forward(self, x):
        return self.net(x).flatten(2).transpose(1, 2)


def gather_rows(rows):
    buckets = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(buckets, rows)
    return torch.cat(buckets)


@torch.inference_mode()
def detect(model, loader, device, threshold=0.7):
    found = []
    for tiles, ids in loader:
        out = model(tiles.to(device))
        keep = out[..., 4].sigmoid() > threshold
        image_ids = ids.to(device)[:, None].expand(keep.shape)
        found.append(torch.cat([image_ids[keep][:, None].float(), out[keep]], dim=1))
    return torch.cat(found)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = TinyDetector()
    model.load_state_dict(torch.load("detector.pt", map_location="cpu", weights_only=True))
    model.to(device).eval()
    loader = DataLoader(Tiles("tiles.pt", rank, world_size), batch_size=64)
    boxes = gather_rows(detect(model, loader, device))
    if rank == 0:
        torch.save(boxes.cpu(), "boxes.pt")
        print(f"{len(boxes)} boxes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
