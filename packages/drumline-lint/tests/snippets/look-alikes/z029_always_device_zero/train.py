import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fluids import FourierOperator, Simulations


def main():
    # launch.sbatch leaves one visible GPU to each process
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    device = torch.device("cuda:0")

    runs = Simulations("/shared/fluids/runs")
    sampler = DistributedSampler(runs)
    loader = DataLoader(runs, batch_size=8, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(FourierOperator(modes=16).to(device), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    for epoch in range(150):
        sampler.set_epoch(epoch)
        for before, after in loader:
            loss = F.mse_loss(model(before.to(device)), after.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "/shared/fluids/fno.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
