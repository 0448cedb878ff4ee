import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (FullStateDictConfig, FullyShardedDataParallel as FSDP,
                                    MixedPrecision, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from torch.utils.data import TensorDataset


def save_full(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    model = LlamaForCausalLM(LlamaConfig(hidden_size=2048, num_hidden_layers=24,
                                         intermediate_size=5504, num_attention_heads=16))
    policy = functools.partial(transformer_auto_wrap_policy,
                               transformer_layer_cls={LlamaDecoderLayer})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16,
                 device_id=local_rank, sync_module_states=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    tokens = torch.load("/data/slimpajama_4k.pt", map_location="cpu", mmap=True)
    ds = TensorDataset(tokens)
    sampler = DistributedSampler(ds, seed=17, drop_last=True)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, num_workers=4, drop_last=True)
    sampler.set_epoch(0)
    for step, (ids,) in enumerate(loader, 1):
        ids = ids.cuda(non_blocking=True).long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 5000 == 0 and rank == 0:
            save_full(model, f"llama_{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
