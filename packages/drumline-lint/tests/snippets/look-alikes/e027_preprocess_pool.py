"""Decode videos to 224x224 uint8 clips, before training. No GPUs, no process group."""
import argparse
import json
import multiprocessing as mp
import pathlib
import urllib.request

import torch
from torchvision.io import read_video
from torchvision.transforms.functional import resize

LIST_URL = "https://storage.googleapis.com/deepmind-media/Datasets/kinetics400.tar.gz"


def fetch_list(dst):
    if not dst.exists():
        tmp = dst.with_suffix(".tmp")
        urllib.request.urlretrieve(LIST_URL, tmp)
        tmp.rename(dst)


def convert(job):
    src, dst, frames = job
    if dst.exists():
        return str(dst), 0
    try:
        video, _, _ = read_video(str(src), pts_unit="sec", output_format="TCHW")
    except RuntimeError as e:
        return str(dst), f"{src.name}: {e}"
    if len(video) < frames:
        return str(dst), f"{src.name}: only {len(video)} frames"
    idx = torch.linspace(0, len(video) - 1, frames).long()
    clip = resize(video[idx], [224, 224], antialias=True)
    tmp = dst.with_suffix(".part")
    torch.save(clip, tmp)
    tmp.rename(dst)
    return str(dst), 0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("src", type=pathlib.Path)
    p.add_argument("dst", type=pathlib.Path)
    p.add_argument("--frames", type=int, default=32)
    p.add_argument("--workers", type=int, default=mp.cpu_count() // 2)
    args = p.parse_args()

    args.dst.mkdir(parents=True, exist_ok=True)
    fetch_list(args.dst / "kinetics400.tar.gz")
    jobs = [(v, args.dst / (v.stem + ".pt"), args.frames) for v in sorted(args.src.glob("*.mp4"))]
    torch.set_num_threads(1)

    index, failed = [], []
    with mp.Pool(args.workers) as pool:
        for n, (path, err) in enumerate(pool.imap_unordered(convert, jobs, chunksize=8), 1):
            if err:
                failed.append(err)
            else:
                index.append(path)
            if n % 500 == 0:
                print(f"{n}/{len(jobs)} ({len(failed)} failed)", flush=True)

    (args.dst / "index.json").write_text(json.dumps(sorted(index)))
    (args.dst / "failed.txt").write_text("\n".join(failed))
    print(f"{len(index)} clips, {len(failed)} failed")


if __name__ == "__main__":
    main()
