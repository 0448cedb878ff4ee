"""Entry point on the cluster: map Slurm's variables to those of torch.distributed."""
import os
import subprocess

import torch
import torch.distributed as dist

from forecasting.loop import fit


def master_from_slurm() -> str:
    nodes = subprocess.check_output(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True
    )
    return nodes.split()[0]


def init_from_slurm() -> int:
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 20000

    os.environ["MASTER_ADDR"] = master_from_slurm()
    os.environ["MASTER_PORT"] = port
    os.environ["RANK"] = rank
    os.environ["WORLD_SIZE"] = world_size
    os.environ["LOCAL_RANK"] = local_rank

    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", init_method="env://")
    return local_rank


def main() -> None:
    local_rank = init_from_slurm()
    try:
        fit(device=torch.device("cuda", local_rank))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
