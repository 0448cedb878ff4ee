import random
from pathlib import Path

import torch
from torch.utils.data import IterableDataset


class ClickShards(IterableDataset):
    def __init__(self, root, rank, world_size):
        super().__init__()
        self.paths = sorted(Path(root).glob("part-*.pt"))
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def __iter__(self):
        order = list(self.paths)
        random.Random(self.epoch).shuffle(order)
        for path in order[self.rank::self.world_size]:
            part = torch.load(path, map_location="cpu", weights_only=True)
            for feats, labels in zip(part["x"].split(4096), part["y"].split(4096)):
                yield feats, labels.float()
