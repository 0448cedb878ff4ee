import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
}


class Chunks(Dataset):
    def __init__(self, path):
        self.tokens = torch.load(path, map_location="cpu")

    def __len__(self):
        return self.tokens.size(0)

    def __getitem__(self, i):
        return self.tokens[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--tokens", default="tokens.pt")
    parser.add_argument("--out", default="/fsx/ckpt/falcon")
    parser.add_argument("--save-interval", type=int, default=500)
    args = parser.parse_args()

    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained("tiiuae/falcon-7b")
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(),
        training_data=Chunks(args.tokens), config=DS_CONFIG)

    for epoch in range(2):
        loader.data_sampler.set_epoch(epoch)
        for batch in loader:
            ids = batch.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if not boundary:
                continue
            step = engine.global_steps
            if dist.get_rank() == 0 and step % args.save_interval == 0:
                print(f"step {step} loss {loss.item():.3f}")
                engine.save_checkpoint(args.out, tag=f"step{step}")


if __name__ == "__main__":
    main()
