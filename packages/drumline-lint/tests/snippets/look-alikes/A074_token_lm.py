import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

STEPS = 50_000


class PackedTokens(IterableDataset):
    def __init__(self, paths, rank, world_size, seed):
        self.paths, self.rank, self.world_size, self.seed = paths, rank, world_size, seed

    def __iter__(self):
        info = get_worker_info()
        workers, wid = (1, 0) if info is None else (info.num_workers, info.id)
        part, parts = self.rank * workers + wid, self.world_size * workers
        epoch = 0
        while True:
            g = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(len(self.paths), generator=g).tolist()
            for k in order[part::parts]:
                yield from torch.load(self.paths[k], map_location="cpu", weights_only=True)
            epoch += 1


class LM(nn.Module):
    def __init__(self, vocab=32_000, d=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, 2, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(6 + rank)
    paths = [f"/data/tokens/{i:04d}.pt" for i in range(1024)]
    ds = PackedTokens(paths, rank, dist.get_world_size(), seed=6)
    batches = iter(DataLoader(ds, batch_size=16, num_workers=4, pin_memory=True))
    model = DDP(LM().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(STEPS):
        ids = next(batches).to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "lstm_lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
