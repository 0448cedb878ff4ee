import glob
import os
import random
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from audio.model import AudioSpectrogramTransformer
from audio.ops import read_tar


class TarStream(IterableDataset):
    def __init__(self, pattern):
        super().__init__()
        self.urls = sorted(glob.glob(pattern))

    def my_urls(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        shard = dist_rank * nw + wid
        return self.urls[shard::dist_world * nw]

    def __iter__(self):
        urls = self.my_urls()
        if not urls:
            raise RuntimeError("fewer tar files than loader workers in the job")
        while True:
            random.shuffle(urls)
            for url in urls:
                yield from read_tar(url)


dist_rank = int(os.environ["RANK"])
dist_world = int(os.environ["WORLD_SIZE"])


def main(epochs=50, steps=1500):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    loader = iter(DataLoader(TarStream("/data/audioset/train-*.tar"), batch_size=24, num_workers=6))
    model = DDP(AudioSpectrogramTransformer(527).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    bce = torch.nn.BCEWithLogitsLoss()

    for epoch in range(epochs):
        model.train()
        seen = torch.zeros((), device="cuda")
        for fbank, tags in islice(loader, steps):
            loss = bce(model(fbank.cuda(non_blocking=True)), tags.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += loss.detach()
        dist.all_reduce(seen)
        if dist_rank == 0:
            print(f"epoch {epoch} loss {seen.item() / (steps * dist_world):.4f}")
            torch.save(model.module.state_dict(), "ast.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
