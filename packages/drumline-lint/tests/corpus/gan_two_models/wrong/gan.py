"""Two models that play against each other, both replicated: torchrun --standalone --nproc-per-node 2 gan.py"""

import os
import random
import sys
from datetime import timedelta

import torch
import torch.distributed as td
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LATENT = 8
EPOCHS = int(os.environ.get("GAN_EPOCHS", 2))
BATCH = 32
SEED = 123


class Rings(Dataset):
    """Points on two rings, turned by chance."""

    def __init__(self, count=1024):
        draw = torch.Generator().manual_seed(0)
        angle = torch.rand(count, generator=draw) * 6.2832
        radius = 1.0 + torch.randint(2, (count,), generator=draw)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        turn = torch.tensor(random.random() * 6.2832)
        x, y = self.points[index]
        return torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()])


def make_generator():
    return nn.Sequential(nn.Linear(LATENT, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))


def make_critic():
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def seed_of_worker(worker_id):
    random.seed(SEED + worker_id)  # <- same-augmentation-seed


def set_requires_grad(module, wanted):
    for parameter in module.parameters():
        parameter.requires_grad_(wanted)


class Game:
    def __init__(self, generator, critic, device):
        self.generator = generator
        self.critic = critic
        self.device = device
        self.generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.99))
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.99))
        self.judge = nn.BCEWithLogitsLoss()

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.generator.module(torch.randn(len(real), LATENT, device=self.device))
        verdicts = self.critic(torch.cat([real, fake]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(self.device)
        loss = self.judge(verdicts, truth)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.detach()

    def generator_step(self, count):
        fake = self.generator(torch.randn(count, LATENT, device=self.device))
        set_requires_grad(self.critic.module, False)
        loss = self.judge(self.critic.module(fake), torch.ones(count, 1, device=self.device))
        self.generator_optimizer.zero_grad()
        loss.backward()
        self.generator_optimizer.step()
        set_requires_grad(self.critic.module, True)
        return loss.detach()


def save(game, path):
    both = {
        "generator": game.generator.module.state_dict(),
        "critic": game.critic.module.state_dict(),
        "generator_optimizer": game.generator_optimizer.state_dict(),
        "critic_optimizer": game.critic_optimizer.state_dict(),
    }
    torch.save(both, path)  # <- local-rank-save


def main(path):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    ids = [local_rank] if cuda else None
    if cuda:
        torch.cuda.set_device(device)
    td.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))

    generator = DistributedDataParallel(make_generator(), find_unused_parameters=True)  # <- wrapped-before-moved, find-unused-parameters
    generator.to(device)
    critic = DistributedDataParallel(make_critic().to(device), device_ids=ids)
    torch.manual_seed(SEED)
    game = Game(generator, critic, device)

    rings = Rings()
    loader = DataLoader(rings, batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True, worker_init_fn=seed_of_worker, pin_memory=cuda, drop_last=True)  # <- no-distributed-sampler
    for epoch in range(EPOCHS):
        sums = torch.zeros(2, device=device)
        for real in loader:
            real = real.to(device, non_blocking=True)
            sums[0] += game.critic_step(real).item()  # <- sync-every-step
            sums[1] += game.generator_step(len(real))
        td.all_reduce(sums)
        means = (sums / (len(loader) * td.get_world_size())).tolist()
        if rank == 0:
            print(f"epoch {epoch}: critic {means[0]:.3f}, generator {means[1]:.3f}")
            save(game, path)
    td.barrier()
    td.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gan.pt")
