import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

from datasets import load_from_disk

MODEL = "mistralai/Mistral-7B-v0.1"
EPOCHS = 2
MAX_NORM = 1.0


def collate(rows):
    ids = torch.tensor([r["input_ids"] for r in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    tok = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.float32, use_cache=False)
    model = FSDP(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy,
                                 transformer_layer_cls={MistralDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )

    ds = load_from_disk("/data/packed_2k")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=1, sampler=sampler, collate_fn=collate, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    sched = get_cosine_schedule_with_warmup(opt, 100, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and step % 20 == 0:
                print(f"{epoch}/{step} loss {loss.item():.3f} gnorm {norm.item():.2f}", flush=True)

    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, "mistral_sft.pt")
        tok.save_pretrained("mistral_sft")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
