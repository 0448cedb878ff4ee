import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import make_loader
from model import SpeechVAE


def main(root, out):
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    sampler, loader = make_loader(root, batch_size=64)
    model = DistributedDataParallel(SpeechVAE().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    step = 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for mel in loader:
            beta = min(1.0, step / 10000)
            loss, parts = model.module.compute_loss(mel.to(device), beta)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0 and step % 200 == 0:
                print(step, {k: round(v.item(), 4) for k, v in parts.items()}, flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(out, "vae.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
