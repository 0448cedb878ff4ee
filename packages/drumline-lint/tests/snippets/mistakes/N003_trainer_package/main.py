import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import build_loaders
from datasets_local import PlantSet
from nets import ConvNeXtSmall
from trainer import Trainer


def run():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    model = DDP(ConvNeXtSmall(38).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loaders = build_loaders(PlantSet("train"), PlantSet("val"), batch_size=64)
    cfg = SimpleNamespace(max_epochs=30, ckpt_path="plant.pt")
    Trainer(model, opt, loaders, device, cfg).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
