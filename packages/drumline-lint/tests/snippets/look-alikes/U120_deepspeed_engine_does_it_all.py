import json
import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from translate.data import ParallelText, make_collate

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def main(out="/ckpt/nllb", epochs=2, every=400):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    deepspeed.init_distributed(dist_backend="nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained("facebook/nllb-200-1.3B", src_lang="deu_Latn", tgt_lang="eng_Latn")
    model = AutoModelForSeq2SeqLM.from_pretrained("facebook/nllb-200-1.3B")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    data = ParallelText("/data/wmt/de-en.tsv")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=make_collate(tok),
                        num_workers=4, drop_last=True)

    _, client = engine.load_checkpoint(out)
    first = client["epoch"] + 1 if client else 0
    last_saved = engine.global_steps
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in loader:
            batch = {k: v.to(engine.device, non_blocking=True) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= last_saved + every:
                last_saved = engine.global_steps
                engine.save_checkpoint(out, tag=f"step{last_saved}", client_state={"epoch": epoch - 1})
                if rank == 0:
                    with open(os.path.join(out, "note.json"), "w") as fh:
                        json.dump({"step": last_saved, "loss": loss.item()}, fh)
        engine.save_checkpoint(out, tag=f"epoch{epoch}", client_state={"epoch": epoch})

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
