"""A plain DDP script: poems, letter by letter."""

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 256 if ON_GPU else 2
CONTEXT = 512 if ON_GPU else 32
WIDTH = 384 if ON_GPU else 16
HEADS = 6 if ON_GPU else 2
LAYERS = 4 if ON_GPU else 1
LETTERS = 96


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inward = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.outward = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.inward(self.norms[0](values)).unflatten(2, (3, HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.outward(mixed.transpose(1, 2).flatten(2))
        return values + self.narrow(functional.gelu(self.widen(self.norms[1](values))))


class PoemNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.scores = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        return self.scores(self.layers(self.letters(letters) + self.places))


def main() -> None:
    device = start()
    torch.set_float32_matmul_precision("high")
    model = PoemNet().to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, fused=True)
    text = torch.randint(LETTERS, (8 * BATCH, CONTEXT + 1), device=device)

    for step in range(STEPS):
        lines = text[torch.randint(len(text), (BATCH,), device=device)]
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(lines[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), lines[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()
