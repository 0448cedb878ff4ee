import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from hydro import RiverGauges, RunoffLSTM

REPORT_EVERY = 200


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank = dist.get_rank()

    gauges = RiverGauges("/data/hydro/camels.nc")
    sampler = DistributedSampler(gauges, drop_last=True)
    loader = DataLoader(gauges, batch_size=256, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)
    model = DDP(RunoffLSTM(hidden=256).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    step = 0
    samples, waited, mark = 0, 0.0, time.perf_counter()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        before = time.perf_counter()
        for forcing, runoff in loader:
            waited += time.perf_counter() - before
            loss = F.mse_loss(model(forcing.cuda(non_blocking=True)), runoff.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            samples += len(runoff)
            step += 1
            if step % REPORT_EVERY == 0:
                stats = torch.tensor([float(samples), waited])
                dist.all_reduce(stats)
                if rank == 0:
                    seconds = time.perf_counter() - mark
                    share = stats[1].item() / dist.get_world_size() / seconds
                    print(f"step {step}: {stats[0].item() / seconds:.0f} samples/s, "
                          f"{share:.0%} waiting for data, loss {loss.item():.4f}", flush=True)
                samples, waited, mark = 0, 0.0, time.perf_counter()
            before = time.perf_counter()
        if rank == 0:
            torch.save(model.module.state_dict(), f"runoff_{epoch:02d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
