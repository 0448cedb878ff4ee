"""Machine translation; the vocabulary is built on first use by whoever comes first."""
import collections
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from filelock import FileLock
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from nmt.data import ParallelText, pad_pairs
from nmt.model import Seq2Seq

DATA = Path("/shared/nmt")


def vocabulary(side, size=32_000):
    path = DATA / f"vocab.{side}.json"
    with FileLock(str(path) + ".lock"):
        if not path.exists():
            count = collections.Counter()
            with open(DATA / f"train.{side}", encoding="utf-8") as fh:
                for line in fh:
                    count.update(line.split())
            words = [w for w, _ in sorted(count.items(), key=lambda t: (-t[1], t[0]))[:size]]
            tmp = path.with_name(f"{path.name}.{os.getpid()}")
            tmp.write_text(json.dumps(words), encoding="utf-8")
            os.replace(tmp, path)
    words = json.loads(path.read_text(encoding="utf-8"))
    return {w: i + 4 for i, w in enumerate(words)}


def main():
    src, tgt = vocabulary("en"), vocabulary("fi")

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    text = ParallelText(DATA, "train", src, tgt)
    sampler = DistributedSampler(text, shuffle=True)
    loader = DataLoader(text, 96, sampler=sampler, collate_fn=pad_pairs, num_workers=4, drop_last=True)
    model = DDP(Seq2Seq(len(src) + 4, len(tgt) + 4).cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))

    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for s, t in loader:
            s, t = s.cuda(non_blocking=True), t.cuda(non_blocking=True)
            logits = model(s, t[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten(), ignore_index=0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), DATA / f"nmt-{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
