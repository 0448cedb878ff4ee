"""Audio-text contrastive pretraining from tar shards (torchrun, one node or several)."""
import glob
import io
import json
import os
import random
import tarfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distfn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class TarStream(IterableDataset):
    """Endless stream of (log-mel, caption ids) pairs; ids are padded, clips have 1024 frames or more."""

    def __init__(self, pattern, seed=0):
        self.shards = sorted(glob.glob(pattern))
        self.seed = seed

    def __iter__(self):
        shards = list(self.shards)
        info = get_worker_info()
        if info is not None:
            shards = shards[info.id::info.num_workers]
        rng = random.Random(self.seed)
        while True:
            rng.shuffle(shards)
            for shard in shards:
                yield from self._read(shard)

    def _read(self, path):
        with tarfile.open(path) as tar:
            meta = None
            for member in tar:
                payload = tar.extractfile(member).read()
                if member.name.endswith(".json"):
                    meta = json.loads(payload)
                elif member.name.endswith(".pt") and meta is not None:
                    mel = torch.load(io.BytesIO(payload))[:, :1024]
                    yield mel, torch.tensor(meta["ids"][:64])
                    meta = None


class TwoTower(nn.Module):
    def __init__(self, vocab=30522, dim=512):
        super().__init__()
        self.audio = nn.GRU(64, dim, 3, batch_first=True)
        self.text = nn.EmbeddingBag(vocab, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, mel, ids):
        a = F.normalize(self.audio(mel.transpose(1, 2))[0].mean(1), dim=-1)
        t = F.normalize(self.text(ids), dim=-1)
        return a, t, self.logit_scale.exp()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    stream = TarStream("/data/audiocaps/train-*.tar", seed=11)
    loader = DataLoader(stream, batch_size=128, num_workers=4, pin_memory=True)
    model = DistributedDataParallel(TwoTower().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)

    for step, (mel, ids) in enumerate(loader):
        if step == 100_000:
            break
        a, t, scale = model(mel.cuda(non_blocking=True), ids.cuda(non_blocking=True))
        all_a = torch.cat(distfn.all_gather(a))
        all_t = torch.cat(distfn.all_gather(t))
        target = torch.arange(a.size(0), device=a.device) + rank * a.size(0)
        loss = (F.cross_entropy(scale * a @ all_t.t(), target) + F.cross_entropy(scale * t @ all_a.t(), target)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 1000 == 0:
            print(step, loss.item(), flush=True)
            torch.save(model.module.state_dict(), f"towers_{step:06d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
