"""DeepSpeed's engine wraps, accumulates, clips, scales and saves; every rank calls all of it."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset


class Pairs(Dataset):
    def __init__(self, count=4096, width=128):
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, width, generator=draw)
        self.targets = self.inputs.roll(1, dims=1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Mixer(nn.Module):
    def __init__(self, width=128, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


SETTINGS = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 50,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="zero")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Mixer()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Pairs(), config=SETTINGS
    )
    _, client = engine.load_checkpoint(args.folder)
    first = client["epoch"] + 1 if client else 0
    for epoch in range(first, args.epochs):
        for step, (inputs, targets) in enumerate(loader):
            inputs = inputs.to(engine.device, dtype=torch.bfloat16)
            targets = targets.to(engine.device, dtype=torch.bfloat16)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if step % 50 == 0 and engine.global_rank == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.4f}")
        engine.save_checkpoint(args.folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
    if engine.global_rank == 0:
        print("done")


if __name__ == "__main__":
    main()
