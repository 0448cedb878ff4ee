import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from weather import Reanalysis, SwinForecaster


class Config:
    root = "/data/era5"
    epochs = 30
    batch_size = 2
    lr = 2e-4
    fp16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


def main(c=Config):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    fields = Reanalysis(c.root, years=range(1980, 2018))
    sampler = DistributedSampler(fields, shuffle=True, drop_last=True)
    loader = DataLoader(fields, batch_size=c.batch_size, sampler=sampler, num_workers=6, pin_memory=True)

    model = FSDP(
        SwinForecaster(channels=73, depth=24),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=20_000_000),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=c.fp16,
        sync_module_states=True,
        device_id=local_rank,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr)
    scaler = GradScaler("cuda")
    criterion = nn.L1Loss()

    for epoch in range(c.epochs):
        sampler.set_epoch(epoch)
        for now, later in loader:
            now, later = now.cuda(non_blocking=True), later.cuda(non_blocking=True)
            loss = criterion(model(now).float(), later)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} l1 {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
