import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer


def full_weights(model):
    keep = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, keep):
        return model.state_dict()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    net = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-2.8b")
    decay = [p for n, p in net.named_parameters() if p.dim() > 1]
    plain = [p for n, p in net.named_parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=2e-5)
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer})
    model = FSDP(net, auto_wrap_policy=wrap, device_id=local_rank,
                 mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))

    code = TensorDataset(torch.load("/data/code_2k.pt", map_location="cpu", mmap=True))
    sampler = DistributedSampler(code, drop_last=True)
    loader = DataLoader(code, 4, sampler=sampler, num_workers=2, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for (ids,) in loader:
            ids = ids.cuda().long()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = full_weights(model)
    if dist.get_rank() == 0:
        torch.save(weights, "pythia_code.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
