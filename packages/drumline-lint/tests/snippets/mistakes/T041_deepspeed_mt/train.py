"""deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds_config.json"""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", default="facebook/nllb-200-1.3B")
    parser.add_argument("--data", default="data/opus_tok")
    parser.add_argument("--save_dir", default="ckpt/nllb")
    parser.add_argument("--save_interval", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


@torch.no_grad()
def dev_loss(engine, loader):
    engine.eval()
    tot = torch.zeros(2, device=engine.device)
    for batch in loader:
        batch = {k: v.to(engine.device) for k, v in batch.items()}
        tot[0] += engine(**batch).loss.float()
        tot[1] += 1
    dist.all_reduce(tot)
    engine.train()
    return (tot[0] / tot[1]).item()


def main():
    args = get_args()
    deepspeed.init_distributed("nccl")
    torch.cuda.set_device(args.local_rank)
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    engine, _, _, sched = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    data = load_from_disk(args.data)
    collate = DataCollatorForSeq2Seq(tok, model=model)
    micro = engine.train_micro_batch_size_per_gpu()
    sampler = DistributedSampler(data["train"], drop_last=True)
    train = DataLoader(data["train"], micro, sampler=sampler, collate_fn=collate, num_workers=4)
    dev = DataLoader(data["dev"], micro, sampler=DistributedSampler(data["dev"], shuffle=False), collate_fn=collate)

    last_saved = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in train:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

            step = engine.global_steps
            if step > last_saved and step % args.save_interval == 0:
                last_saved = step
                dl = dev_loss(engine, dev)
                if rank == 0:
                    print(f"step {step} dev loss {dl:.4f}", flush=True)
                    engine.save_checkpoint(args.save_dir, tag=f"step{step}",
                                           client_state={"epoch": epoch, "dev_loss": dl})


if __name__ == "__main__":
    main()
