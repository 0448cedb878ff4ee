from dataclasses import dataclass, field


@dataclass
class Config:
    model: str = "roberta-large"
    task: str = "qqp"
    epochs: int = 6
    per_gpu_batch: int = 16
    peak_lr: float = 1e-5
    warmup_ratio: float = 0.06
    weight_decay: float = 0.1
    max_len: int = 256
    out: str = "out/qqp"
    log_every: int = 100
    betas: tuple = field(default_factory=lambda: (0.9, 0.98))


def num_training_steps(cfg, dataset):
    return cfg.epochs * (len(dataset) // cfg.per_gpu_batch)
