"""deepspeed --hostfile hosts Q031_deepspeed_save.py"""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--model", default="EleutherAI/pythia-6.9b")
    ap.add_argument("--data", default="/data/dolly_packed")
    ap.add_argument("--out", default="/shared/pythia-sft")
    args = ap.parse_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS)
    ds = load_from_disk(args.data).with_format("torch")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, drop_last=True)
    rank0 = dist.get_rank() == 0

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=engine.device)
        for batch in loader:
            ids = batch["input_ids"].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})
    engine.save_16bit_model(args.out, "pytorch_model.bin")
    if rank0:
        tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()
