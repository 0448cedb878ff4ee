import math
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tts.data import LJSpeechMels, mel_collate
from tts.losses import TacotronLoss
from tts.tacotron import Tacotron2


def main():
    dist.init_process_group(backend="nccl", init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = dist.get_rank()
    torch.cuda.set_device(local_rank)

    ds = LJSpeechMels("filelists/train.txt")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, collate_fn=mel_collate,
                        num_workers=4, drop_last=True)
    model = DDP(Tacotron2().cuda(), device_ids=[local_rank])
    criterion = TacotronLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    iteration = 0
    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            t0 = time.perf_counter()
            x, y = Tacotron2.parse_batch(batch, device=local_rank)
            optimizer.zero_grad(set_to_none=True)
            y_pred = model(x)
            loss = criterion(y_pred, y)

            value = loss.item()
            if not math.isfinite(value):
                print(f"rank {rank}: non-finite loss at iteration {iteration}, skipping batch")
                continue

            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            if rank == 0:
                print(f"{iteration} loss {value:.5f} grad {grad_norm:.4f} {time.perf_counter() - t0:.2f}s/it")
                if iteration % 1000 == 0:
                    torch.save({"iteration": iteration, "state_dict": model.module.state_dict(),
                                "optimizer": optimizer.state_dict()}, f"out/ckpt_{iteration}")
            iteration += 1

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
