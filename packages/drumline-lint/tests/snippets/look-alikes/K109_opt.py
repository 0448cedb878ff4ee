import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer


def save(model, path):
    how = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    net = AutoModelForCausalLM.from_pretrained("facebook/opt-2.7b")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={OPTDecoderLayer})
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(net, auto_wrap_policy=policy, mixed_precision=half, device_id=local_rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ds = TensorDataset(torch.load("/data/legal_2k.pt", map_location="cpu", mmap=True))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, num_workers=2, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in loader:
            ids = ids.cuda().long()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        save(model, f"opt_legal_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
