from dataclasses import dataclass, field


@dataclass
class RunConfig:
    model: str = "facebook/opt-1.3b"
    data: str = "data/alpaca.pt"
    out: str = "ckpt/opt"
    epochs: int = 3
    save_every: int = 500
    seed: int = 1
    ds: dict = field(default_factory=lambda: {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
    })
