import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

from asr.data import LibriMix, collate
from asr.wav2vec import Wav2VecCTC

ACCUM = 8


def config(lr):
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": ACCUM,
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
        "steps_per_print": 100,
    }


def ctc(engine, batch):
    audio, audio_len, text, text_len = (t.to(engine.device) for t in batch)
    log_probs, out_len = engine(audio.half(), audio_len)
    return F.ctc_loss(log_probs.float().transpose(0, 1), text, out_len, text_len, zero_infinity=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()

    deepspeed.init_distributed("nccl")
    torch.manual_seed(1234)
    model = Wav2VecCTC(vocab=32)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(args.lr))

    dataset = LibriMix("/data/librimix", split="train-360")
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, 6, sampler=sampler, collate_fn=collate, num_workers=4, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            loss = ctc(engine, batch)
            engine.backward(loss)
            if (i + 1) % ACCUM == 0:
                engine.step()
            if engine.global_rank == 0 and i % 400 == 0:
                print(f"epoch {epoch} it {i} loss {loss.item():.4f}")
        engine.save_checkpoint("ckpt/wav2vec", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
