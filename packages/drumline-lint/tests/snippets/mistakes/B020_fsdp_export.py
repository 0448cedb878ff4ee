import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration


def get_data(path):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(blob["source"], blob["mask"], blob["target"])


class SummarizerTrainer:
    def __init__(self, out="out/t5"):
        self.out = Path(out)
        self.rank = dist.get_rank()
        self.device = torch.device("cuda", torch.cuda.current_device())
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000_000)
        net = T5ForConditionalGeneration(T5Config.from_pretrained("configs/t5-large"))
        self.model = FSDP(net, auto_wrap_policy=policy, device_id=self.device, sync_module_states=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def save(self, epoch):
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, full):
                weights = self.model.state_dict()
            torch.save(weights, self.out / f"epoch{epoch}.pt")
        dist.barrier()

    def train(self, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, drop_last=True)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            total = torch.zeros(2, device=self.device)
            for src, mask, tgt in loader:
                out = self.model(input_ids=src.to(self.device), attention_mask=mask.to(self.device),
                                 labels=tgt.to(self.device))
                self.opt.zero_grad(set_to_none=True)
                out.loss.backward()
                self.model.clip_grad_norm_(1.0)
                self.opt.step()
                total += torch.stack([out.loss.detach(), torch.ones_like(out.loss)])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")
            self.save(epoch)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(21)
    SummarizerTrainer().train(get_data("data/cnn_dm.pt"), epochs=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
