"""A drafter of one's own: after each token the one that followed it most often so far.

python examples/successor_drafter.py          # check it, then decode with it
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.drafters import Draft, Drafter, DraftRow, chain_draft
from foredraft.methods import METHODS, Method
from foredraft.testing import check_drafter


class SuccessorDrafter(Drafter):
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return chain_draft([follow(row.token_ids, row.num_draft_tokens) for row in rows])


def follow(text: list[int], num_tokens: int) -> list[int]:
    successors: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for token, following in pairwise(text):
        successors[token][following] += 1
    draft, token = [], text[-1]
    while len(draft) < num_tokens and successors[token]:
        token = successors[token].most_common(1)[0][0]
        draft.append(token)
    return draft


def build(*_: Any) -> Drafter:
    return SuccessorDrafter()


METHODS["successor"] = Method(module=__name__, num_speculative_tokens=3)


def main(model: str = "smollm2-135m-instruct", max_tokens: int = 48) -> None:
    check_drafter(lambda target, draft_model: SuccessorDrafter())
    prompt = "Repeat this list twice: apples, pears, plums, cherries, apricots."
    texts = []
    for method in ("none", "successor"):
        output = LLM(model, speculative_config={"method": method}).generate(
            prompt, SamplingParams(temperature=0, max_tokens=max_tokens)
        )[0]
        texts.append(output.outputs[0].token_ids)
        print(f"{method}: {output.metrics.tokens_per_target_pass:.2f} tokens per target pass, {output.contract}")
    print(f"identical: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
