import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from tinyinstruct.data import InstructDataset, collate_fn

NUM_EPOCHS = 3
BATCH = 4
WARMUP_RATIO = 0.03


def main():
    accelerator = Accelerator(mixed_precision="bf16", log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("instruct")

    name = "EleutherAI/pythia-1.4b"
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name)
    dataset = InstructDataset("data/instruct.jsonl", tokenizer, max_len=1024)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=4,
                        collate_fn=collate_fn(tokenizer), drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    total_steps = NUM_EPOCHS * len(loader)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=math.ceil(WARMUP_RATIO * total_steps),
        num_training_steps=total_steps,
    )
    scheduler = accelerator.prepare(scheduler)

    step = 0
    for epoch in range(NUM_EPOCHS):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 25 == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.log({"loss": mean, "lr": scheduler.get_last_lr()[0]}, step=step)
        accelerator.save_state(f"ckpt/epoch_{epoch}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
