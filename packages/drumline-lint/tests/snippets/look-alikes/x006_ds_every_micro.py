# deepspeed --num_gpus 8 ds_every_micro.py
import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {
    "train_batch_size": 512,  # 16 x 4 x 8
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def main():
    deepspeed.init_distributed()
    net = nn.Sequential(nn.Linear(512, 8192), nn.GELU(), nn.Linear(8192, 10))
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    blob = torch.load("/data/tabular/train.pt", map_location="cpu")
    data = TensorDataset(blob["x"].bfloat16(), blob["y"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = engine(x.to(engine.device))
            loss = loss_fn(logits.float(), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint("/ckpt/tabular", tag=f"epoch{epoch}")
        if engine.global_rank == 0:
            print(f"epoch {epoch}: {engine.global_steps} updates, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
