import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from genomics.config import parse_args
from genomics.data import GenomeWindows
from genomics.model import Enformer


def save_full(model, optim, path, step):
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        weights = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        tmp = f"{path}.tmp"
        torch.save({"model": weights, "optim": optim_state, "step": step}, tmp)
        os.replace(tmp, path)
    dist.barrier()


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(args.seed)

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5_000_000)
    model = FSDP(Enformer(args.dim, args.depth), auto_wrap_policy=policy, device_id=local_rank,
                 use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ds = GenomeWindows(args.fasta, args.tracks, split="train")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for seq, tracks in loader:
            pred = model(seq.cuda(non_blocking=True))
            loss = F.poisson_nll_loss(pred, tracks.cuda(non_blocking=True), log_input=False)
            loss.backward()
            model.clip_grad_norm_(0.2)
            optim.step()
            optim.zero_grad(set_to_none=True)
            step += 1
            if step % args.save_every == 0:
                save_full(model, optim, os.path.join(args.out, "last.pt"), step)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    save_full(model, optim, os.path.join(args.out, "final.pt"), step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
