import os
from datetime import timedelta

import sacrebleu
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, MarianMTModel

NAME = "Helsinki-NLP/opus-mt-de-en"


@torch.no_grad()
def bleu(net, tokenizer, rows):
    net.eval()
    hyps, refs = [], []
    for start in range(0, len(rows), 64):
        part = rows[start:start + 64]
        enc = tokenizer(part["de"], return_tensors="pt", padding=True, truncation=True).to("cuda")
        out = net.generate(**enc, num_beams=4, max_new_tokens=200)
        hyps += tokenizer.batch_decode(out, skip_special_tokens=True)
        refs += part["en"]
    net.train()
    return sacrebleu.corpus_bleu(hyps, [refs]).score


def main():
    dist.init_process_group("nccl", timeout=timedelta(hours=2))
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tokenizer = AutoTokenizer.from_pretrained(NAME)
    train = load_from_disk("data/medline_tokenized")["train"]
    dev = load_from_disk("data/medline_raw")["dev"]
    net = MarianMTModel.from_pretrained(NAME).cuda()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, 32, sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer, net))

    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    best = 0.0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        if rank == 0:
            score = bleu(model.module, tokenizer, dev)
            print(f"epoch {epoch} BLEU {score:.2f}", flush=True)
            if score > best:
                best = score
                model.module.save_pretrained("marian_medline")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
