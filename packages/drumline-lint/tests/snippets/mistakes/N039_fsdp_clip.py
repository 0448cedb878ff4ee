import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from protein.data import UniRef, mask_collate
from protein.esm import ESM


class Config:
    lr = 4e-4
    clip = 1.0
    steps = 100_000
    batch = 8
    data = "/data/uniref50.lmdb"


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(cfg=Config()):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)

    model = FullyShardedDataParallel(
        ESM(layers=33, dim=1280),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=10_000_000),
        device_id=local_rank,
        sync_module_states=True,
    )
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    ds = UniRef(cfg.data)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, collate_fn=mask_collate, drop_last=True)

    for step, (tok, tgt) in zip(range(cfg.steps), cycle(loader, sampler)):
        logits = model(tok.cuda())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt.cuda().flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optim.step()
        optim.zero_grad(set_to_none=True)
        if dist.get_rank() == 0 and step % 50 == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
