import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from domain.corpus import PackedCorpus


def export(model, optimizer, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        params = model.state_dict()
    opt = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": params, "optimizer": opt}, path)
        print("wrote", path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer})
    model = FSDP(GPTNeoXForCausalLM.from_pretrained("EleutherAI/pythia-2.8b"),
                 auto_wrap_policy=wrap, device_id=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    corpus = PackedCorpus("/data/legal/train.bin", seq_len=2048)
    sampler = DistributedSampler(corpus, shuffle=True, drop_last=True)
    loader = DataLoader(corpus, batch_size=2, sampler=sampler, num_workers=2, drop_last=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, ids in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"{epoch}/{step} {avg.item():.4f}")
        export(model, optimizer, f"/ckpt/legal_{epoch}.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
