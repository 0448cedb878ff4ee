"""deepspeed --num_gpus 8 ds_gpt.py"""
import deepspeed
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

from corpus import PackedTokens

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}


def is_main():
    return dist.get_rank() == 0


def main():
    deepspeed.init_distributed()
    model = GPT2LMHeadModel(GPT2Config(n_layer=36, n_head=20, n_embd=1280))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)

    corpus = PackedTokens("/data/openwebtext.bin", length=1024)
    sampler = DistributedSampler(corpus, shuffle=True)
    loader = DataLoader(corpus, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, num_workers=4)

    last_save = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.to(engine.device)
            loss = engine(ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= last_save + 500:
                last_save = engine.global_steps
                if is_main():
                    print(f"step {engine.global_steps}  loss {loss.item():.3f}")
                    engine.save_checkpoint("/ckpt/gpt-large", tag=f"step{engine.global_steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
