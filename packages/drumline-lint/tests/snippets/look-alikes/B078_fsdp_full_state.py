import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration


class Trainer:
    def __init__(self, device, out):
        self.device, self.rank, self.out = device, dist.get_rank(), Path(out)
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000_000)
        net = T5ForConditionalGeneration(T5Config.from_pretrained("configs/t5-base"))
        self.model = FSDP(net, auto_wrap_policy=policy, device_id=device, sync_module_states=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def save(self, name):
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, full):
            weights = self.model.state_dict()
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            torch.save(weights, self.out / name)
        dist.barrier()

    def train(self, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            total = torch.zeros(2, device=self.device)
            for src, mask, tgt in loader:
                src, mask, tgt = src.to(self.device), mask.to(self.device), tgt.to(self.device)
                loss = self.model(input_ids=src, attention_mask=mask, labels=tgt).loss
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.model.clip_grad_norm_(1.0)
                self.opt.step()
                total += torch.stack([loss.detach(), torch.ones_like(loss)])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")
            self.save(f"epoch{epoch}.pt")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(33)
    blob = torch.load("data/mt.pt", map_location="cpu", weights_only=True)
    Trainer(device, "out/t5").train(TensorDataset(blob["src"], blob["mask"], blob["tgt"]), epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
