"""Let a target write texts to train heads on, with the states that heads of all kinds read.

    python benchmarks/write_texts.py DIR [MODEL] [--num-tokens 300000] [--data FILE ...] [--layers 2,15,27,-1]

``foredraft train KIND --data DIR`` then trains on them. Killed or stopped by Ctrl-C, it goes on where it was; called
again with more tokens, it adds to what is there. The layers default to those that EAGLE-3 reads and the
one that the target's own head reads (numbered as in ``foredraft.target.features``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoConfig

from foredraft.target.features import AFTER_NORM
from foredraft.target.zoo import resolve_model
from foredraft.train.collect import collect, load_writer, open_store
from foredraft.train.files import FromFiles
from foredraft.train.own_words import OwnWords


def main(options: argparse.Namespace) -> None:
    layers = options.layers
    if layers is None:
        num_layers = AutoConfig.from_pretrained(resolve_model(options.model)).get_text_config().num_hidden_layers
        layers = (2, num_layers // 2, num_layers - 3, AFTER_NORM)
    llm, writer = load_writer(options.model, layers, num_threads=options.threads)
    settings = {"seed": options.seed, "max_tokens": options.max_tokens}
    limit = writer.engine.target.max_model_len
    source = (
        FromFiles(options.data, llm.tokenizer, limit, **settings)
        if options.data
        else OwnWords(llm.tokenizer, limit, **settings)
    )
    store = open_store(options.directory, llm, writer, source)
    try:
        collect(store, source, writer, num_tokens=options.num_tokens, use_tqdm=True)
    except KeyboardInterrupt:
        print("stopped; the piece that was being written is not kept")
    print(
        f"{options.directory}: {len(store)} texts in {store.num_pieces} pieces, {store.num_tokens} answer tokens, "
        f"{store.tokens_per_second:.0f} tokens/s over {store.seconds / 60:.1f} min"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--num-tokens", type=int, default=300_000, help="of answers")
    parser.add_argument("--data", type=Path, nargs="*", help="texts or chats to take instead of own words")
    parser.add_argument("--layers", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    main(parser.parse_args())
