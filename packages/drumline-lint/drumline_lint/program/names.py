"""Names of library functions, and the one canonical name that rules use."""

from __future__ import annotations

from functools import cache

DDP = "torch.nn.parallel.DistributedDataParallel"
DATA_PARALLEL = "torch.nn.DataParallel"
LOADER = "torch.utils.data.DataLoader"
DISTRIBUTED_SAMPLER = "torch.utils.data.DistributedSampler"
GRAD_SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")
FSDP = (
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard",
)
INIT = "torch.distributed.init_process_group"
SYNC_BATCH_NORM = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"

# Every rank must call them, or those that do wait.
COLLECTIVES = frozenset(
    f"torch.distributed.{name}"
    for name in "all_gather all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all "
    "all_to_all_single barrier broadcast broadcast_object_list gather gather_object monitored_barrier "
    "new_group new_subgroups reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list "
    "init_device_mesh".split()
)
# These call collectives, although their names do not show it.
COLLECTIVE_SAVES = frozenset(
    "torch.distributed.checkpoint.save torch.distributed.checkpoint.async_save "
    "torch.distributed.checkpoint.load torch.distributed.checkpoint.save_state_dict "
    "torch.distributed.checkpoint.load_state_dict "
    "torch.distributed.checkpoint.state_dict.get_state_dict "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict "
    "torch.distributed.fsdp.FullyShardedDataParallel.state_dict "
    "torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict "
    "torch.distributed.fsdp.FullyShardedDataParallel.full_optim_state_dict "
    "torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params "
    "torch.distributed.fsdp.FullyShardedDataParallel.save_pretrained "
    "torch.distributed.optim.ZeroRedundancyOptimizer.consolidate_state_dict".split()
)
# What prepares models and loaders for several processes.
ACCELERATOR = "accelerate.Accelerator"
FABRIC = "lightning.Fabric"
DEEPSPEED = "deepspeed.initialize"
# Code that calls one of these trains in several processes; code that only reads a rank may not.
STARTS = frozenset(
    {DDP, DISTRIBUTED_SAMPLER, INIT, *FSDP, *COLLECTIVES, "drumline.DDPManager"}
    | {ACCELERATOR, FABRIC, DEEPSPEED}
)
# They handle samplers, wrapping and devices themselves.
FRAMEWORKS = tuple(
    "accelerate lightning pytorch_lightning deepspeed ray ignite horovod composer".split()
)

_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.nn.parallel.DataParallel": DATA_PARALLEL,
    "torch.nn.parallel.data_parallel.DataParallel": DATA_PARALLEL,
    "torch.utils.data.distributed.DistributedSampler": DISTRIBUTED_SAMPLER,
    "torch.utils.data.dataloader.DataLoader": LOADER,
    "torch_geometric.loader.DataLoader": LOADER,
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "drumline.training.manager.DDPManager": "drumline.DDPManager",
    "accelerate.accelerator.Accelerator": ACCELERATOR,
    "lightning.fabric.Fabric": FABRIC,
    "lightning_fabric.Fabric": FABRIC,
    "lightning.LightningModule": "pytorch_lightning.LightningModule",
    "lightning.Trainer": "pytorch_lightning.Trainer",
}
_SAME_BEGINNINGS = (
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("torch.nn.modules.batchnorm.", "torch.nn."),
    ("torch.nn.modules.module.", "torch.nn."),
    ("torch.nn.modules.", "torch.nn."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("lightning.pytorch.", "pytorch_lightning."),
)


@cache
def canonical(name: str) -> str:
    """One name for things that can be imported from several places."""
    if name in _SAME:
        return _SAME[name]

    for beginning, instead in _SAME_BEGINNINGS:
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)

    return name
