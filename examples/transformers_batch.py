"""Stay in transformers: a ragged batch through ``model.generate``, decoded by foredraft.

python examples/transformers_batch.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foredraft
from foredraft.target.zoo import resolve_model


def main(name: str = "smollm2-135m-instruct", max_new_tokens: int = 24) -> None:
    folder = resolve_model(name)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(["The capital of France is", "One, two, three, four,"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    ours = model.generate(**inputs, **options, custom_generate=foredraft.transformers_generate)
    theirs = model.generate(**inputs, **options)
    for text in tokenizer.batch_decode(ours, skip_special_tokens=True):
        print(text)
    print(f"identical to transformers' own: {torch.equal(ours, theirs)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
