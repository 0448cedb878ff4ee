"""DeepSpeed ZeRO-3 fine-tuning; batch sizes come from the config file."""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from legal.data import Contracts


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--base", default="/models/mistral-7b")
    ap.add_argument("--out", default="/ckpt/contracts")
    ap.add_argument("--epochs", type=int, default=2)
    return deepspeed.add_config_arguments(ap).parse_args()


def main():
    args = parse()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(33)

    tok = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )

    data = Contracts("/data/contracts", tok, length=4096)
    sampler = DistributedSampler(data, shuffle=True, seed=33, drop_last=True)
    loader = DataLoader(
        data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, num_workers=2, drop_last=True
    )

    _, state = engine.load_checkpoint(args.out)
    first = state["epoch"] + 1 if state else 0

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for i, ids in enumerate(loader):
            ids = ids.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            if i % 25 == 0 and rank == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.3f}", flush=True)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})

    engine.save_16bit_model(args.out, "model.bin")
    if rank == 0:
        tok.save_pretrained(args.out)
        model.config.save_pretrained(args.out)


if __name__ == "__main__":
    main()
