"""Lightning's Trainer, Lightning Fabric and Accelerate, each as its own documentation shows it.

They are imported when they are asked for, and only if they are installed. The process group is
there already; all three take it as it is.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Way
from benchmarks.paused_loop import AfterStep
from benchmarks.work import Batch, Work


def peers(work: Work, *, suffix: str = "") -> list[Way]:
    """Those that are installed."""
    installed = []
    if find_spec("lightning") is not None:
        installed.append(Way(f"Lightning{suffix}", partial(lightning, work)))
        installed.append(Way(f"Fabric{suffix}", partial(lightning_fabric, work)))
    if find_spec("accelerate") is not None:
        installed.append(Way(f"Accelerate{suffix}", partial(accelerate, work)))
    return installed


def lightning(work: Work, after_step: AfterStep) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    _keep_quiet()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            module = work.module()
            self.plain = [module]  # not a submodule: the optimizer is made from it
            self.model = torch.compile(module) if work.is_compiled else module

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss: Tensor = self.model(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.plain[0])

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # The Trainer's own gradient_clip_val refuses fused optimizers under autocast.
            if work.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.plain[0].parameters(), work.clip_norm)

    class HandOver(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Batch, index: int
        ) -> None:
            after_step(len(batch[0]))

    trainer = Trainer(
        **_where(work),
        max_epochs=-1,
        benchmark=True,
        callbacks=[HandOver()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), work.batches())


def lightning_fabric(work: Work, after_step: AfterStep) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(**_where(work))
    fabric.launch()
    module = work.module()
    batches = work.batches()
    if isinstance(batches, torch.utils.data.DataLoader):
        batches = fabric.setup_dataloaders(batches)
    compiled = torch.compile(module) if work.is_compiled else module
    model, optimizer = fabric.setup(compiled, work.optimizer(module))
    while True:
        for inputs, targets in map(work.on_device, batches):
            loss = model(inputs, targets)
            fabric.backward(loss)
            if work.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), work.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after_step(len(inputs))


def accelerate(work: Work, after_step: AfterStep) -> None:
    """Its own DDP begins with two processes: with one, prepare() leaves the model as it is."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision="bf16" if work.config.train.precision == "bf16" else "no",
        dynamo_backend="inductor" if work.is_compiled else None,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    module = work.module()
    batches = work.batches()
    if isinstance(batches, torch.utils.data.DataLoader):
        batches = accelerator.prepare(batches)
    model, optimizer = accelerator.prepare(module, work.optimizer(module))
    while True:
        for inputs, targets in map(work.on_device, batches):
            loss = model(inputs, targets)
            accelerator.backward(loss)
            if work.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after_step(len(inputs))


def _where(work: Work) -> dict[str, Any]:
    return {
        "accelerator": "gpu" if work.device.type == "cuda" else "cpu",
        "devices": 1,
        "strategy": "ddp",
        "precision": "bf16-mixed" if work.config.train.precision == "bf16" else "32-true",
    }


def _keep_quiet() -> None:
    """Advice on the number of workers, and on how to use a GPU, is not what a table is about."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
