"""Continued pretraining with FSDP; writes one consolidated file."""
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from cpt.blocks import Block, Decoder
from cpt.data import TokenFile


def full_weights(model):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        return model.state_dict()


class Saver:
    def __init__(self, folder):
        self.folder = folder
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)

    def __call__(self, model, step):
        weights = full_weights(model)
        if not weights:
            return
        tmp = os.path.join(self.folder, "model.tmp")
        torch.save({"model": weights, "step": step}, tmp)
        os.replace(tmp, os.path.join(self.folder, f"step{step:06d}.pt"))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tokens = TokenFile("/data/cpt/tokens.bin", seq=4096)
    sampler = DistributedSampler(tokens, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(tokens, batch_size=1, sampler=sampler, num_workers=2, drop_last=True)
    model = FSDP(
        Decoder(layers=24, dim=2048),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=local,
        sync_module_states=True,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    save = Saver("/ckpt/cpt")

    step = 0
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = model(x.cuda(), y.cuda())
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 1000 == 0:
                save(model, step)
    save(model, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
