import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer


def save(model, opt, step, path):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                              FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        weights = model.state_dict()
        optim = FSDP.optim_state_dict(model, opt)
    if dist.get_rank() == 0:
        tmp = path + ".tmp"
        torch.save({"model": weights, "optim": optim, "step": step}, tmp)
        os.replace(tmp, path)
        print("saved", path, flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", default="pile.pt")
    ap.add_argument("--bs", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--save-every", type=int, default=1000)
    ap.add_argument("--out", default="neox.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    data = TensorDataset(torch.load(args.tokens, map_location="cpu", mmap=True).view(-1, 2048))
    sampler = DistributedSampler(data, drop_last=True)
    dl = DataLoader(data, args.bs, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = FSDP(
        GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=2560, num_hidden_layers=32, num_attention_heads=32)),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=local_rank,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1.6e-4, betas=(0.9, 0.95))

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in dl:
            ids = ids.long().cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if rank == 0 and step % 20 == 0:
                print(step, round(loss.item(), 4), flush=True)
            if step % args.save_every == 0:
                save(model, opt, step, args.out)
    save(model, opt, step, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
