"""Pretrain a GPT-2 XL from scratch with FSDP."""
import argparse
import functools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


class Packed(Dataset):
    def __init__(self, path, length):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.length = length

    def __len__(self):
        return len(self.data) // self.length

    def __getitem__(self, i):
        return torch.from_numpy(self.data[i * self.length:(i + 1) * self.length].astype(np.int64))


def wrap(model):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16,
                device_id=torch.cuda.current_device(), use_orig_params=True)


def save(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    torch.save(state, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", default="data/pile_train.bin")
    ap.add_argument("--steps", type=int, default=100000)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--out", default="ckpt")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)

    torch.manual_seed(0)
    model = wrap(GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2000, args.steps)

    data = Packed(args.tokens, 1024)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if rank == 0 and step % 50 == 0:
                print(f"{step:6d} loss {loss.item():.3f}", flush=True)
            if rank == 0 and step % 2000 == 0:
                save(model, os.path.join(args.out, f"gpt2xl_{step}.pt"))
            if step >= args.steps:
                break
        epoch += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
