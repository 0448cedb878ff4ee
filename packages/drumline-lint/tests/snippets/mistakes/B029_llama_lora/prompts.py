TEMPLATE = "<|user|>\n{question}\n<|assistant|>\n{answer}"


def render(row):
    return TEMPLATE.format(question=row["question"].strip(), answer=row["answer"].strip())


def make_encode(tokenizer, max_length):
    def encode(row):
        enc = tokenizer(render(row) + tokenizer.eos_token, truncation=True, max_length=max_length)
        enc["labels"] = list(enc["input_ids"])
        return enc

    return encode
