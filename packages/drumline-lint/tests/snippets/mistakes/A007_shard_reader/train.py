import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ctr_data import ClickShards
from ctr_model import DeepCTR
from launch import launch_env


def main():
    env = launch_env()
    torch.manual_seed(5 + env.rank)
    dataset = ClickShards("/data/clicks", rank=env.rank, world_size=env.world_size)
    loader = DataLoader(dataset, batch_size=None, num_workers=4, pin_memory=True)
    model = DDP(DeepCTR().to(env.device), device_ids=[env.local_rank])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    bce = torch.nn.BCEWithLogitsLoss()
    for epoch in range(3):
        dataset.epoch = epoch
        with model.join():
            for feats, clicked in loader:
                loss = bce(model(feats.to(env.device)), clicked.to(env.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if env.rank == 0:
            torch.save(model.module.state_dict(), f"ctr_epoch{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
