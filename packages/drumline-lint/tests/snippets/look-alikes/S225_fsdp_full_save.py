# torchrun --nproc_per_node=8 fsdp_full_save.py
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer


def export(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = load_from_disk("law_tok")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, collate_fn=default_data_collator)
    model = FSDP(
        AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-6.9b"),
        auto_wrap_policy=ModuleWrapPolicy({GPTNeoXLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=gpu,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for i, batch in enumerate(loader):
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            if i % 20 == 0 and dist.get_rank() == 0:
                print(epoch, i, loss.item(), flush=True)
        export(model, f"law-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
