import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from distrib import start, stop
from experiment import Experiment
from toy import Regressor, curves


def main():
    device, rank = start()
    exp = Experiment(root="/shared/runs", name="curves")
    if rank == 0:
        exp.create({"lr": 1e-3, "epochs": 50})
    dist.barrier()

    ds = curves("curves.pt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    model = DDP(Regressor().to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(torch.get_rng_state(), exp.rng_file(rank))
        if rank == 0:
            torch.save(model.module.state_dict(), exp.weights_file(epoch))
    stop()


if __name__ == "__main__":
    main()
