"""Two stages: `--stage 1` trains from scratch, `--stage 2` starts from the weights of stage 1."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from superres import PatchPairs, SwinIR, charbonnier

SETTINGS = {
    1: dict(data="/data/sr/df2k", epochs=200, lr=2e-4, start=None, out="/models/sr/stage1.pt"),
    2: dict(data="/data/sr/phone", epochs=40, lr=5e-5, start="/models/sr/stage1.pt",
            out="/models/sr/stage2.pt"),
}


def export(net, path):
    """Weights only, as CPU tensors."""
    torch.save({name: t.cpu() for name, t in net.state_dict().items()}, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=SETTINGS, required=True)
    cfg = SETTINGS[parser.parse_args().stage]

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    net = SwinIR(upscale=4)
    if cfg["start"]:
        net.load_state_dict(torch.load(cfg["start"], weights_only=True))
    model = DDP(net.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])

    pairs = PatchPairs(cfg["data"], scale=4)
    sampler = DistributedSampler(pairs, drop_last=True)
    loader = DataLoader(pairs, batch_size=4, sampler=sampler, num_workers=8, pin_memory=True)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for low, high in loader:
            loss = charbonnier(model(low.cuda(non_blocking=True)), high.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            export(model.module, cfg["out"])

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
