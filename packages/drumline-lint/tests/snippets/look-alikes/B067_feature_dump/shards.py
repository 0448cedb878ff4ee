from pathlib import Path

import torch
import torch.distributed as dist


class ShardWriter:
    def __init__(self, folder, env):
        self.folder, self.env = Path(folder), env
        if env.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()

    def path(self, rank):
        return self.folder / f"part-{rank:05d}.pt"

    def write(self, features, index):
        torch.save({"features": features, "index": index}, self.path(self.env.rank))
        dist.barrier()

    def merge(self):
        if not self.env.is_main:
            return
        parts = [torch.load(self.path(r), map_location="cpu", weights_only=True) for r in range(self.env.world_size)]
        index = torch.cat([p["index"] for p in parts])
        features = torch.cat([p["features"] for p in parts])
        torch.save(features[index.argsort()], self.folder / "features.pt")
