"""What the jobs of this folder share. Without a GPU their sizes are small, only to see that they run."""

import os

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
STEPS = 30 if ON_GPU else 3


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def start() -> torch.device:
    """Collective: joins the process group, and returns the device of this rank."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(dist.get_rank())
    if not ON_GPU:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def finish() -> None:
    """Collective: leaves the group when all ranks are done."""
    if ON_GPU:
        torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"done: {STEPS} steps", flush=True)
    dist.destroy_process_group()
