import argparse

import deepspeed
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from medqa.data import MedQA, collate


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--out", default="out/medqa-13b")
    args = ap.parse_args()

    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained("meta-llama/Llama-2-13b-hf")
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-13b-hf")
    model.gradient_checkpointing_enable()

    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        training_data=MedQA(tok, "train"), collate_fn=collate, config="ds_zero3.json")

    for epoch in range(args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, loss {loss.item():.4f}")

    engine.save_16bit_model(args.out, "pytorch_model.bin")
    if dist.get_rank() == 0:
        tok.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
