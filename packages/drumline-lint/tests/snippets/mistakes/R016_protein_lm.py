import logging
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from protlm.data import UniRefStream
from protlm.model import Block, ProtLM

logger = logging.getLogger("protlm")


def build_model(cfg, device):
    model = ProtLM(vocab=33, dim=cfg.dim, depth=cfg.depth, heads=cfg.heads)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
        use_orig_params=True,
        limit_all_gathers=True,
    )


def param_groups(model, wd):
    decay = [p for n, p in model.named_parameters() if not n.endswith("bias") and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n]
    return [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]


def main(cfg):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(cfg.seed)

    model = build_model(cfg.model, device)
    opt = torch.optim.AdamW(param_groups(model, cfg.wd), lr=cfg.lr, betas=(0.9, 0.98), fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 1e-3, 1.0, total_iters=cfg.warmup)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cfg.steps - cfg.warmup)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, decay], milestones=[cfg.warmup])

    stream = UniRefStream(cfg.data, rank=rank, world_size=world, mask_prob=0.15, seed=cfg.seed)
    loader = iter(DataLoader(stream, batch_size=cfg.micro_batch, num_workers=cfg.workers, pin_memory=True))

    t0 = time.perf_counter()
    for step in range(1, cfg.steps + 1):
        tokens, targets = (t.to(device, non_blocking=True) for t in next(loader))
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)

        if step % cfg.log_every == 0:
            stat = loss.detach().clone()
            dist.all_reduce(stat, op=dist.ReduceOp.AVG)
            logger.info("step %d loss %.4f gnorm %.3f %.1f s", step, stat.item(), grad_norm.item(),
                        time.perf_counter() - t0)
        if step % cfg.save_every == 0:
            model_sd, opt_sd = get_state_dict(model, opt)
            dcp.save({"model": model_sd, "optim": opt_sd}, checkpoint_id=f"{cfg.out}/step-{step}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main(OmegaConf.load(sys.argv[1]))
