"""Resample a speech corpus to 16 kHz with a pool of processes (no GPUs, no process group)."""
import argparse
import multiprocessing as mp
import os

import torch
import torchaudio


def work(job):
    rank, world_size, files, out_dir = job
    torch.set_num_threads(1)
    resamplers = {}
    done = 0
    for path in files[rank::world_size]:
        wav, sr = torchaudio.load(path)
        if sr != 16000:
            if sr not in resamplers:
                resamplers[sr] = torchaudio.transforms.Resample(sr, 16000)
            wav = resamplers[sr](wav)
        target = os.path.join(out_dir, os.path.splitext(os.path.basename(path))[0] + ".pt")
        torch.save(wav.mean(0), target)
        done += 1
    return rank, done


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("listing")
    ap.add_argument("out_dir")
    ap.add_argument("--workers", type=int, default=os.cpu_count())
    args = ap.parse_args()
    os.makedirs(args.out_dir, exist_ok=True)
    with open(args.listing) as fh:
        files = [line.strip() for line in fh if line.strip()]
    names = {os.path.basename(f) for f in files}
    assert len(names) == len(files), "file names must be unique"
    world_size = args.workers
    jobs = [(rank, world_size, files, args.out_dir) for rank in range(world_size)]
    with mp.get_context("spawn").Pool(world_size) as pool:
        for rank, done in pool.imap_unordered(work, jobs):
            print(f"worker {rank}: {done} files")


if __name__ == "__main__":
    main()
