import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLayer

from masked import MaskedText


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return dist.get_rank(), local_rank


def save_full(model, path, rank):
    how = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
        weights = model.state_dict()
    if rank == 0:
        torch.save(weights, path)


def main():
    rank, local_rank = setup()
    text = MaskedText("/data/pubmed")
    sampler = DistributedSampler(text)
    loader = DataLoader(text, batch_size=32, sampler=sampler, num_workers=4)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={BertLayer})
    model = FSDP(
        BertForMaskedLM.from_pretrained("/models/bert-large"),
        auto_wrap_policy=policy,
        device_id=local_rank,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**{k: v.cuda(non_blocking=True) for k, v in batch.items()}).loss
            opt.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
        save_full(model, f"/ckpt/pubmed_{epoch}.pt", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
