import io
import os
import tarfile
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
from torchvision import models
from torchvision.transforms.functional import to_tensor


class TarShards(IterableDataset):
    def __init__(self, root, rank, world):
        self.shards = sorted(Path(root).glob("*.tar"))[rank::world]

    def __iter__(self):
        for shard in self.shards:
            with tarfile.open(shard) as tf:
                for m in tf:
                    if m.name.endswith(".jpg"):
                        img = Image.open(io.BytesIO(tf.extractfile(m).read())).convert("RGB")
                        yield to_tensor(img.resize((224, 224))), int(m.name.split("_")[0])


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    dataset = TarShards("/data/web/train", rank, world)
    loader = DataLoader(dataset, batch_size=64, num_workers=1, pin_memory=True)
    model = DDP(models.resnet50(num_classes=1000).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(10):
        model.train()
        for i, (x, y) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and i % 100 == 0:
                print(epoch, i, loss.item())
        if rank == 0:
            torch.save(model.module.state_dict(), f"r50_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
