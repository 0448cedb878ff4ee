from dataclasses import dataclass


@dataclass
class Settings:
    path: str = "electricity.pt"
    window: int = 168
    horizon: int = 24
    batch_size: int = 256
    epochs: int = 30
    lr: float = 1e-3
    seed: int = 0
    out: str = "forecaster.pt"
