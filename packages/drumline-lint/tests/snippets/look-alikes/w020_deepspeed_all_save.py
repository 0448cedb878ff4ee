import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

from code_corpus import CodeWindows

DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
}


class CodeTuner:
    def __init__(self, args):
        deepspeed.init_distributed()
        model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS)
        windows = CodeWindows(args.data, length=4096)
        self.sampler = DistributedSampler(windows)
        self.loader = DataLoader(windows, batch_size=2, sampler=self.sampler, num_workers=2)
        self.out = args.out

    def epoch(self, n):
        self.sampler.set_epoch(n)
        for ids in self.loader:
            ids = ids.to(self.engine.device)
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
        self.engine.save_checkpoint(self.out, tag=f"epoch{n}")
        if dist.get_rank() == 0:
            print(f"epoch {n} loss {loss.item():.4f}, {self.engine.global_steps} steps", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description="deepspeed code_tuner.py --model ...")
    ap.add_argument("--model", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--local_rank", type=int, default=-1, help="passed by the deepspeed launcher")
    tuner = CodeTuner(ap.parse_args())
    for n in range(3):
        tuner.epoch(n)
    dist.destroy_process_group()
