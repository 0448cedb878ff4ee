import argparse
import json
import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator, get_cosine_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mistralai/Mistral-7B-v0.1")
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--max-steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MistralDecoderLayer"],
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    set_seed(11)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(load_from_disk(args.data), batch_size=1, shuffle=True,
                        collate_fn=default_data_collator)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100 * accelerator.num_processes,
                                                args.max_steps * accelerator.num_processes)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

    step, epoch = 0, 0
    while step < args.max_steps:
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % args.save_every == 0 and accelerator.is_main_process:
                path = os.path.join(args.output, f"step_{step}")
                accelerator.save_state(path)
                with open(os.path.join(path, "meta.json"), "w") as fh:
                    json.dump({"step": step, "epoch": epoch, "loss": loss.item()}, fh)
            if step >= args.max_steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
