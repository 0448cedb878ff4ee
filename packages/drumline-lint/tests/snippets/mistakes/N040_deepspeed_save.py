import argparse
import os

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat.data import ChatDataset, collate_chat


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bigscience/bloom-3b")
    parser.add_argument("--data", default="sharegpt.json")
    parser.add_argument("--save-dir", default="ckpts")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    ds = ChatDataset(args.data, tok)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=engine.train_micro_batch_size_per_gpu(),
                        sampler=sampler, collate_fn=collate_chat)
    rank = torch.distributed.get_rank()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps and engine.global_steps % args.save_every == 0:
                if rank == 0:
                    engine.save_checkpoint(args.save_dir, tag=f"step{engine.global_steps}")
                    print("saved", engine.global_steps)


if __name__ == "__main__":
    main()
