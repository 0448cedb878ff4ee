import argparse
import io
import os
import tarfile

import soundfile as sf
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from asr.model import ConformerCTC
from asr.text import CharTokenizer


class TarAudio(IterableDataset):
    """Reads (wav, txt) pairs from uncompressed tar shards."""

    def __init__(self, shards, tokenizer, rank, world_size):
        usable = len(shards) // world_size * world_size
        self.shards = shards[:usable][rank::world_size]
        self.tokenizer = tokenizer

    @staticmethod
    def _pairs(tar):
        pending = {}
        for member in tar:
            stem, ext = os.path.splitext(member.name)
            pending.setdefault(stem, {})[ext] = tar.extractfile(member).read()
            if len(pending[stem]) == 2:
                yield pending.pop(stem)

    def __iter__(self):
        while True:
            for path in self.shards:
                with tarfile.open(path) as tar:
                    for pair in self._pairs(tar):
                        wav, _ = sf.read(io.BytesIO(pair[".wav"]), dtype="float32")
                        text = pair[".txt"].decode().strip()
                        yield torch.from_numpy(wav), torch.tensor(self.tokenizer.encode(text))


def collate(batch):
    wavs, texts = zip(*batch)
    wav_len = torch.tensor([len(w) for w in wavs])
    txt_len = torch.tensor([len(t) for t in texts])
    wavs = torch.nn.utils.rnn.pad_sequence(wavs, batch_first=True)
    texts = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return wavs, wav_len, texts, txt_len


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shards", nargs="+", required=True)
    ap.add_argument("--vocab", required=True)
    ap.add_argument("--steps", type=int, default=200_000)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--out", default="exp/conformer")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()

    tok = CharTokenizer(args.vocab)
    ds = TarAudio(sorted(args.shards), tok, rank, world)
    loader = DataLoader(ds, batch_size=args.batch, num_workers=8, collate_fn=collate, pin_memory=True)
    model = DDP(ConformerCTC(vocab=len(tok)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ctc = torch.nn.CTCLoss(zero_infinity=True)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    for step, (wav, wav_len, txt, txt_len) in zip(range(args.steps), loader):
        logits, out_len = model(wav.cuda(non_blocking=True), wav_len.cuda(non_blocking=True))
        logp = logits.float().log_softmax(-1).transpose(0, 1)
        loss = ctc(logp, txt.cuda(non_blocking=True), out_len, txt_len.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if rank == 0 and step % 2000 == 0:
            print(step, loss.item(), flush=True)
            torch.save({"step": step, "model": model.module.state_dict()}, f"{args.out}/model.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
