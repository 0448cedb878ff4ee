import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, set_seed

from config import RunConfig


class Finetuner:
    def __init__(self, cfg):
        self.cfg = cfg
        model = AutoModelForCausalLM.from_pretrained(cfg.model)
        self.engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=cfg.ds)
        blob = torch.load(cfg.data, map_location="cpu", weights_only=True)
        self.data = TensorDataset(blob["input_ids"], blob["labels"])
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, cfg.ds["train_micro_batch_size_per_gpu"], sampler=self.sampler,
                                 drop_last=True)
        self.rank = dist.get_rank()

    def maybe_save(self, step):
        if step % self.cfg.save_every == 0 and self.rank == 0:
            self.engine.save_checkpoint(self.cfg.out, tag=f"step{step}")

    def run(self):
        step = 0
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for ids, labels in self.loader:
                ids, labels = ids.to(self.engine.device), labels.to(self.engine.device)
                loss = self.engine(input_ids=ids, labels=labels).loss
                self.engine.backward(loss)
                boundary = self.engine.is_gradient_accumulation_boundary()
                self.engine.step()
                if boundary:
                    step += 1
                    if self.rank == 0 and step % 10 == 0:
                        print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
                    self.maybe_save(step)


def main():
    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cfg = RunConfig()
    set_seed(cfg.seed)
    Finetuner(cfg).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
