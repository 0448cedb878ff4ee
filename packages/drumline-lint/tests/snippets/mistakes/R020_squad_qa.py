import argparse
import os
import pickle

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from squad.features import convert_examples_to_features
from squad.reader import read_squad


def load_and_cache_examples(args, tokenizer):
    if args.rank != 0:
        dist.barrier()

    cached = os.path.join(args.data_dir, f"cached_train_{args.max_seq_length}.pkl")
    if os.path.exists(cached):
        with open(cached, "rb") as f:
            features = pickle.load(f)
    else:
        examples = read_squad(os.path.join(args.data_dir, "train-v1.1.json"))
        features = convert_examples_to_features(examples, tokenizer, args.max_seq_length, args.doc_stride)
        if args.rank == 0:
            with open(cached, "wb") as f:
                pickle.dump(features, f)

    cols = ["input_ids", "attention_mask", "token_type_ids", "start_position", "end_position"]
    return TensorDataset(*(torch.tensor([getattr(x, c) for x in features]) for c in cols))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_seq_length", type=int, default=384)
    parser.add_argument("--doc_stride", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-5)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.rank = dist.get_rank()
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)

    tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model_dir, add_pooling_layer=False).to(device)
    dataset = load_and_cache_examples(args, tokenizer)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size, drop_last=True)
    model = DDP(model, device_ids=[args.local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, (ids, mask, types, start, end) in enumerate(loader):
            out = model(input_ids=ids.to(device), attention_mask=mask.to(device),
                        token_type_ids=types.to(device), start_positions=start.to(device),
                        end_positions=end.to(device))
            optimizer.zero_grad(set_to_none=True)
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if args.rank == 0 and step % 100 == 0:
                print(f"{epoch} {step}/{len(loader)} {out.loss.item():.3f}", flush=True)

    if args.rank == 0:
        model.module.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
