"""Long-horizon forecasting transformer under FSDP."""
import functools
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from forecast.blocks import PatchBlock
from forecast.data import WindowedSeries
from forecast.model import PatchForecaster

MAX_NORM = 0.5


def lr_at(step, peak=3e-4, warm=500, total=40_000):
    if step < warm:
        return peak * (step + 1) / warm
    return 0.5 * peak * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))


def wrap(net, device):
    return FSDP(
        net,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={PatchBlock}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
        sync_module_states=True,
    )


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    data = WindowedSeries("/data/series", context=2048, horizon=336)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=4, drop_last=True)

    model = wrap(PatchForecaster(dim=1024, depth=24), device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    step, epoch = 0, 0
    while step < 40_000:
        sampler.set_epoch(epoch)
        for past, future in loader:
            for group in opt.param_groups:
                group["lr"] = lr_at(step)
            pred = model(past.to(device))
            loss = nn.functional.huber_loss(pred.float(), future.to(device))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and step % 100 == 0:
                print(f"{step} loss {loss.item():.4f} gnorm {norm.item():.3f}", flush=True)
            step += 1
        epoch += 1

    state = model.state_dict()
    if rank == 0:
        torch.save(state, "forecaster.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
