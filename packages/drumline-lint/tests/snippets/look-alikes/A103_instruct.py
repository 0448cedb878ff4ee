import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.TransformerEncoderLayer):
    def __init__(self, d):
        super().__init__(d, 32, 4 * d, batch_first=True, norm_first=True)


class Base(nn.Module):
    def __init__(self, vocab=32_000, d=4096, n=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h, src_mask=mask)
        return self.head(h)


def load_base(path, rank):
    if rank == 0:
        model = Base()
        model.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        return model
    with torch.device("meta"):
        return Base()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(4 + rank)
    model = FSDP(
        load_base("base.pt", rank),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        param_init_fn=None if rank == 0 else lambda m: m.to_empty(device=device, recurse=False),
        device_id=device,
        sync_module_states=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ds = TensorDataset(torch.load("instruct.pt", map_location="cpu", weights_only=True))
    sampler = DistributedSampler(ds, seed=4, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            ids = ids.to(device)
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).float().transpose(1, 2), ids[:, 1:])
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, "instruct_model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
