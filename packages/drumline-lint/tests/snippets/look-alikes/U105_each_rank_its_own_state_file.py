import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from rl.envs import make_vec_env
from rl.ppo import ActorCritic, collect, ppo_loss

RUN = "/shared/runs/ppo_atari"


def save(update, model, optim, rank):
    if rank == 0:
        torch.save({"update": update, "model": model.module.state_dict(), "optim": optim.state_dict()},
                   f"{RUN}/model_{update:06d}.pt")
    torch.save({
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }, f"{RUN}/rng_{update:06d}_rank{rank:03d}.pt")
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    os.makedirs(RUN, exist_ok=True)

    seed = 1000 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = make_vec_env("BreakoutNoFrameskip-v4", n=16, seed=seed)

    model = DDP(ActorCritic(envs.action_space.n).cuda(), device_ids=[local_rank])
    optim = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)

    for update in range(1, 10_001):
        rollout = collect(model.module, envs, horizon=128)
        for _ in range(4):
            for mb in rollout.minibatches(4):
                logits, values = model(mb.obs)
                loss = ppo_loss(logits, values, mb, clip=0.1)
                optim.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optim.step()
        ret = torch.tensor(rollout.mean_return, device="cuda")
        dist.all_reduce(ret)
        if rank == 0:
            print(f"update {update} return {ret.item() / world:.2f}")
        if update % 500 == 0:
            save(update, model, optim, rank)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
