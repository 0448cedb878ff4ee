import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_linear_schedule_with_warmup

from summarize.data import load_cnn_dailymail


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default=None)
    parser.add_argument("--out", default="/ckpt/t5-cnn")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(7)
    tokenizer = AutoTokenizer.from_pretrained("google/flan-t5-large")
    model = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-large")
    with accelerator.main_process_first():
        dataset = load_cnn_dailymail(tokenizer, max_source=512, max_target=128)
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=4,
                        collate_fn=DataCollatorForSeq2Seq(tokenizer, model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.05 * total), total)

    start = 0
    if args.resume:
        accelerator.load_state(args.resume)
        start = int(os.path.basename(args.resume).split("_")[1]) + 1
        accelerator.print(f"resumed after epoch {start - 1}")

    for epoch in range(start, args.epochs):
        loader.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 200 == 0:
                accelerator.print(epoch, step, loss.item(), scheduler.get_last_lr()[0])
        accelerator.save_state(os.path.join(args.out, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
