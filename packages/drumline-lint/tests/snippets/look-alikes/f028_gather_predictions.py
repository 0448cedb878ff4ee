"""Write the transcripts of a test set, decoded on several GPUs (torchrun)."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torchaudio
from torch.utils.data import DataLoader, Dataset
from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

NAME = "facebook/wav2vec2-large-960h-lv60-self"


class Utterances(Dataset):
    def __init__(self, manifest, rank, world_size):
        with open(manifest) as f:
            rows = [json.loads(line) for line in f]
        rows.sort(key=lambda r: r["duration"], reverse=True)
        self.rows = rows[rank::world_size]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        wav, _ = torchaudio.load(self.rows[i]["audio"])
        return self.rows[i]["id"], wav[0].numpy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--out", default="hyp.tsv")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    processor = Wav2Vec2Processor.from_pretrained(NAME)
    model = Wav2Vec2ForCTC.from_pretrained(NAME).cuda().eval()

    def collate(batch):
        ids, waves = zip(*batch)
        enc = processor(list(waves), sampling_rate=16000, padding=True, return_tensors="pt")
        return ids, enc.input_values, enc.attention_mask

    data = Utterances(args.manifest, rank, world_size)
    loader = DataLoader(data, batch_size=8, collate_fn=collate, num_workers=4)

    mine = []
    with torch.inference_mode():
        for ids, values, mask in loader:
            logits = model(values.cuda(), attention_mask=mask.cuda()).logits
            texts = processor.batch_decode(logits.argmax(-1).cpu())
            mine += list(zip(ids, texts))

    if rank == 0:
        parts = [None] * world_size
        dist.gather_object(mine, parts, dst=0)
    else:
        parts = None
        dist.gather_object(mine, None, dst=0)

    if rank == 0:
        merged = sorted(pair for part in parts for pair in part)
        with open(args.out, "w", encoding="utf-8") as f:
            for utt, text in merged:
                f.write(f"{utt}\t{text}\n")
        print(f"wrote {len(merged)} transcripts to {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
