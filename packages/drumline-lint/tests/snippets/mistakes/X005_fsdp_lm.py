"""Small language model under FSDP.   torchrun --nproc_per_node=8 fsdp_lm.py"""
import functools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


def batches(tokens, rank, world, step, bs=8, seq=1024):
    rng = np.random.default_rng([step, rank, world])
    starts = rng.integers(0, len(tokens) - seq - 1, size=bs)
    return torch.stack([torch.from_numpy(tokens[s:s + seq].astype(np.int64)) for s in starts])


def save(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        weights = model.state_dict()
    torch.save(weights, path)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    model = FSDP(GPT2LMHeadModel(GPT2Config()), auto_wrap_policy=policy, device_id=local_rank,
                 sync_module_states=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    tokens = np.memmap("/data/owt/train.bin", dtype=np.uint16, mode="r")

    for step in range(1, 20001):
        ids = batches(tokens, rank, world, step).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 2000 == 0 and rank == 0:
            save(model, f"/ckpt/gpt2_{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
