import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, set_seed

DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}


class ZeroTrainer:
    def __init__(self, base, out):
        self.out = Path(out)
        model = AutoModelForCausalLM.from_pretrained(base)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS)

    def save(self, step, loss):
        tag = f"step{step}"
        self.engine.save_checkpoint(str(self.out), tag=tag)
        if dist.get_rank() == 0:
            (self.out / tag / "note.json").write_text(json.dumps({"step": step, "loss": loss}))

    def mean(self, loss):
        value = loss.detach().float().clone()
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        return value.item()

    def fit(self, data, epochs, every):
        sampler = DistributedSampler(data, drop_last=True)
        loader = DataLoader(data, DS["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)
        step = 0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for ids, labels in loader:
                out = self.engine(input_ids=ids.to(self.engine.device), labels=labels.to(self.engine.device))
                self.engine.backward(out.loss)
                boundary = self.engine.is_gradient_accumulation_boundary()
                self.engine.step()
                if boundary:
                    step += 1
                    if step % every == 0:
                        loss = self.mean(out.loss)
                        if dist.get_rank() == 0:
                            print(f"epoch {epoch} step {step} loss {loss:.3f}")
                        self.save(step, loss)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    set_seed(5)
    blob = torch.load("data/chat.pt", map_location="cpu", weights_only=True)
    ZeroTrainer("facebook/opt-2.7b", "ckpt").fit(TensorDataset(blob["ids"], blob["labels"]), epochs=2, every=200)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
