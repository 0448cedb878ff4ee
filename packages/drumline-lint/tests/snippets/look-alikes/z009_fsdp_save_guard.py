import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from patents import PatentBlocks


def save_full(model, path):
    gather = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, gather):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path + ".tmp")
        os.replace(path + ".tmp", path)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = GPTNeoXForCausalLM.from_pretrained("/models/pythia-6.9b", torch_dtype=torch.float32)
    model.config.use_cache = False
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=local_rank,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.2e-5)

    blocks = PatentBlocks("/data/patents", length=2048)
    sampler = DistributedSampler(blocks, drop_last=True)
    loader = DataLoader(blocks, batch_size=2, sampler=sampler, num_workers=2, pin_memory=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for ids in loader:
            ids = ids.cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        save_full(model, f"/lustre/patents/epoch{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
