import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from codegen.data import CodeDataset, collate

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
}


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--model", default="Salesforce/codegen-2B-mono")
    parser.add_argument("--out", default="/nfs/ckpt/codegen")
    parser.add_argument("--save-every", type=int, default=1000)
    return parser.parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    train = CodeDataset("data/train.jsonl", tok, seq_len=1024)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=train,
        collate_fn=collate, config=DS_CONFIG)

    for epoch in range(2):
        loader.data_sampler.set_epoch(epoch)
        engine.train()
        for i, batch in enumerate(loader):
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

            if engine.global_steps and engine.is_gradient_accumulation_boundary():
                if engine.global_steps % args.save_every == 0 and dist.get_rank() == 0:
                    print(f"step {engine.global_steps} loss {loss.item():.3f}, saving")
                    engine.save_checkpoint(args.out, tag=f"step{engine.global_steps}")

    engine.save_checkpoint(args.out, tag="final")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
