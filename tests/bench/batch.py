"""Tokens per second of prompts in one batch, beside the same prompts one after the other.

    python tests/bench/batch.py MODEL [--dtype float32] [--prompts 16] [--tokens 48] [--packed]

Prompts are read in both, so these are tokens per second of the whole. Look at the ratio, not at the figures.
"""

import argparse
import time
from collections.abc import Callable

from measuring import dense, print_table

PLACES = ["France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Canada", "India", "Spain", "Chile", "Poland", "Ghana"]
ASKED = ["What is the capital of {}?", "Write a sentence about the rivers of {}.", "What do people eat in {}?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to write for each, whatever it says")
    parser.add_argument("--packed", action="store_true", help="leave packed weights packed")
    given = parser.parse_args()
    lm = dense(given.model, given.dtype, given.packed)
    texts = [ASKED[i % len(ASKED)].format(PLACES[i % len(PLACES)]) for i in range(given.prompts)]
    prompts = [lm.chat([{"role": "user", "content": text}]) if lm.has_chat_template else text for text in texts]
    settings = {"max_tokens": given.tokens, "stop_at_end": False}
    list(lm.generate(prompts[0], max_tokens=4))  # weights are read when they are first used

    def alone() -> list[list[int]]:
        return [[step.token for step in lm.generate(prompt, **settings)] for prompt in prompts]

    def together() -> list[list[int]]:
        return [result.tokens for result in lm.batch(prompts, size=given.prompts, **settings)]

    (one, wanted), (batch, found) = timed(alone), timed(together)
    count = given.prompts * given.tokens
    rows = [("one at a time", count / one, 1.0), (f"a batch of {given.prompts}", count / batch, one / batch)]
    print_table(["", "tokens/s", "ratio"], rows)
    same = sum(a == b for a, b in zip(wanted, found, strict=True))
    print(f"{same} of {given.prompts} texts are the same")


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Seconds, and what was found."""
    begun = time.perf_counter()
    found = run()
    return time.perf_counter() - begun, found


if __name__ == "__main__":
    main()
