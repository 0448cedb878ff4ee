"""Train the sentence encoder on some GPUs of this machine."""
import argparse
import os

import torch
from torch import nn

from sentences import Encoder, batches


def describe():
    for i in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        print(f"cuda:{i} {props.name} {free / 2**30:.1f}/{total / 2**30:.1f} GiB free")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", default="0", help="such as 2,3")
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()

    if not torch.cuda.is_available():
        raise SystemExit("this script needs a GPU")
    describe()
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus

    model = Encoder().to("cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for step, (a, b) in enumerate(batches("data/pairs.tsv", size=64)):
        if step == args.steps:
            break
        optimizer.zero_grad()
        score = model(a.to("cuda:0")) @ model(b.to("cuda:0")).T
        target = torch.arange(score.shape[0], device=score.device)
        nn.functional.cross_entropy(score, target).backward()
        optimizer.step()
    torch.save(model.state_dict(), "encoder.pt")


if __name__ == "__main__":
    main()
