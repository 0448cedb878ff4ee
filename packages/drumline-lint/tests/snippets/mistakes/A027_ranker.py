import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Ranker(nn.Module):
    def __init__(self, width=4096, depth=12):
        super().__init__()
        layers = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        self.body = nn.Sequential(*layers)
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(self.body(x)).squeeze(-1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())

    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    model = FSDP(
        Ranker(),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=5_000_000),
        mixed_precision=half,
        device_id=device,
        sync_module_states=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = GradScaler("cuda")

    blob = torch.load("features.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=64, sampler=sampler, drop_last=True, pin_memory=True)

    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(x.to(device)).float(), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
