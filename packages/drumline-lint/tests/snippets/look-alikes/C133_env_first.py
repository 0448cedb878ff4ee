"""Runs under torchrun; defaults for our two shared servers."""
import os

os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0,1,2,3")
os.environ.setdefault("OMP_NUM_THREADS", "4")
os.environ.setdefault("NCCL_DEBUG", "WARN")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from reader.loop import fit  # noqa: E402


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    try:
        fit(torch.device("cuda", local_rank))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
