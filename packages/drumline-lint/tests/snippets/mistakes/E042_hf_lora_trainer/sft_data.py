from datasets import load_dataset

TEMPLATE = "### Instruction:\n{instruction}\n\n### Response:\n{output}"


def load_sft(path, tokenizer, max_len):
    ds = load_dataset("json", data_files=path, split="train")

    def encode(row):
        text = TEMPLATE.format(**row) + tokenizer.eos_token
        return tokenizer(text, truncation=True, max_length=max_len)

    return ds.map(encode, remove_columns=ds.column_names)
