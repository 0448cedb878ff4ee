"""Translate with T5 under FSDP (launch with torchrun --nproc_per_node=4)."""
import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block


def setup():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), local_rank


def main():
    rank, local_rank = setup()
    model = T5ForConditionalGeneration.from_pretrained("t5-large")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        device_id=local_rank,
    )

    pairs = load_from_disk("/data/wmt_t5").with_format("torch")
    sampler = DistributedSampler(pairs, shuffle=True)
    loader = DataLoader(pairs, batch_size=8, sampler=sampler, num_workers=2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: last loss {loss.item():.3f}")

    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        weights = model.state_dict()
    if rank == 0:
        torch.save(weights, "/ckpt/t5_wmt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
