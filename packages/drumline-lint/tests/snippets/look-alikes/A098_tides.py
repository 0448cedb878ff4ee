import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PendingMean:
    def __init__(self, device):
        self.device, self.work, self.buf = device, None, None

    def launch(self, total, n):
        self.buf = torch.tensor([total, n], dtype=torch.float64, device=self.device)
        self.work = dist.all_reduce(self.buf, async_op=True)

    def result(self):
        if self.work is None:
            return None
        self.work.wait()
        self.work = None
        return (self.buf[0] / self.buf[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(23 + rank)
    d = torch.load("tides.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["height"])
    sampler = DistributedSampler(ds, seed=23, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(72, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pending = PendingMean(device)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        total, n = 0.0, 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)).squeeze(-1), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            n += len(y)
        previous = pending.result()
        pending.launch(total, n)
        if rank == 0 and previous is not None:
            print(f"epoch {epoch - 1}: mse {previous:.5f}")
    final = pending.result()
    if rank == 0:
        print(f"last epoch: mse {final:.5f}")
        torch.save(model.module.state_dict(), "tides_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
