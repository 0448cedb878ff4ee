"""accelerate launch --num_processes 8 train_sql.py"""
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from text2sql import SqlPairs, collate

SAVE_EVERY = 500


def main():
    set_seed(11)
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MistralDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=True,
    )
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2,
                              fsdp_plugin=plugin)

    model = AutoModelForCausalLM.from_pretrained("/models/mistral-7b", use_cache=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(SqlPairs("/data/sql/train.jsonl"), batch_size=2, shuffle=True,
                        collate_fn=collate, num_workers=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    done = 0
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            if done % 50 == 0:
                accelerator.print(f"epoch {epoch} step {done} loss {loss.item():.3f}")
            if done % SAVE_EVERY == 0 and accelerator.is_main_process:
                accelerator.save_state(f"/checkpoints/sql/step_{done}")

    accelerator.save_model(model, "/checkpoints/sql/final")
    accelerator.end_training()


if __name__ == "__main__":
    main()
