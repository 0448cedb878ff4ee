# deepspeed --num_gpus 8 ds_accum.py
import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO = 16
ACCUM = 4

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": ACCUM,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def main():
    deepspeed.init_distributed()
    net = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10))
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=DS_CONFIG)

    blob = torch.load("/data/tabular/train.pt", map_location="cpu")
    data = TensorDataset(blob["x"].bfloat16(), blob["y"])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=MICRO, sampler=sampler, drop_last=True)

    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            logits = engine(x.to(engine.device))
            loss = loss_fn(logits.float(), y.to(engine.device))
            engine.backward(loss)
            if (i + 1) % ACCUM == 0:
                engine.step()
        engine.save_checkpoint("/ckpt/tabular", tag=f"epoch{epoch}")
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
