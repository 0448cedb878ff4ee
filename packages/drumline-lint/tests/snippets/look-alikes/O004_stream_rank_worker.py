import json
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lm.model import SmallLM
from lm.tok import encode


class Corpus(IterableDataset):
    def __init__(self, files, length, rank, world):
        self.files, self.length, self.rank, self.world = files, length, rank, world

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (0, 1) if info is None else (info.id, info.num_workers)
        shard, shards = self.rank * nw + wid, self.world * nw
        n = 0
        while True:
            for path in self.files:
                with open(path) as f:
                    for line in f:
                        if n % shards == shard:
                            yield torch.tensor(encode(json.loads(line)["text"], self.length))
                        n += 1


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    files = sorted(os.path.join("/data/c4", f) for f in os.listdir("/data/c4"))
    loader = DataLoader(Corpus(files, 1024, rank, world), batch_size=16, num_workers=4)
    model = DDP(SmallLM().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, ids in enumerate(islice(loader, 100_000)):
        ids = ids.cuda(non_blocking=True)
        loss = model(ids)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if rank == 0 and step % 1000 == 0:
            print(step, loss.item())
            torch.save(model.module.state_dict(), "lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
