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


class Layer(nn.TransformerEncoderLayer):
    def __init__(self, d):
        super().__init__(d, 16, 4 * d, batch_first=True, norm_first=True)


class Reader(nn.Module):
    def __init__(self, vocab=32_000, d=1024, n=16, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))
        self.out = nn.Linear(d, classes)

    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(1))


def export(model, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(3 + dist.get_rank())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    model = FSDP(Reader(), auto_wrap_policy=policy, device_id=device, sync_module_states=True,
                 mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    d = torch.load("race.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["ids"], d["answer"])
    sampler = DistributedSampler(ds, seed=3, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for ids, answer in loader:
            loss = nn.functional.cross_entropy(model(ids.to(device)).float(), answer.to(device))
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        export(model, f"reader_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
