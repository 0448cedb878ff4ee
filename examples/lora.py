"""LoRA by peft, on the language model of finetune_lm.py: only the adapters are trained.

drumline train examples/lora.py:Lora --task.base base --data.dir answers
"""

from typing import Any, ClassVar

from finetune_lm import FineTune
from peft import LoraConfig, get_peft_model
from torch import nn


class Lora(FineTune):
    defaults: ClassVar[dict[str, Any]] = {**FineTune.defaults, "optim.lr": 2e-4, "optim.weight_decay": 0.0}

    adapter_rank: int = 8
    """The inner width of an adapter's two matrices."""
    adapter_dropout: float = 0.05
    """Fraction of an adapter's inputs that is dropped in training."""

    def model(self) -> nn.Module:
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=self.adapter_rank,
            lora_alpha=2 * self.adapter_rank,
            lora_dropout=self.adapter_dropout,
        )
        return get_peft_model(super().model(), settings)  # the other weights are frozen
