import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM

DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--base", default="/models/mistral-7b")
    ap.add_argument("--tokens", default="/data/instruct_2k.pt")
    args = ap.parse_args()

    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(args.base, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS)

    d = torch.load(args.tokens, map_location="cpu")
    ds = TensorDataset(d["ids"], d["labels"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=engine.train_micro_batch_size_per_gpu(),
                        sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        engine.train()
        for ids, labels in loader:
            ids, labels = ids.to(engine.device), labels.to(engine.device)
            loss = engine(input_ids=ids, labels=labels).loss
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            engine.save_checkpoint("ckpt_instruct", tag=f"epoch{epoch}")
            print("saved epoch", epoch)


if __name__ == "__main__":
    main()
