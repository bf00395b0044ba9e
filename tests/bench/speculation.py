"""Tokens per second with guesses from the text itself (prompt lookup), beside plain decoding, on a copy-editing prompt.

    python tests/bench/speculation.py MODEL [--dtype float32] [--tokens 160] [--rounds 3] [--packed]

The two take turns in one process, so that a busy machine slows both alike: look at the ratio, not at the figures. The
model is asked to repeat a text with one word changed, so much of what it writes stands in its prompt.
"""

import argparse
import statistics

from measuring import dense, print_table

TEXT = """The harbour office opens at seven in the morning and closes at four in the afternoon. Visitors who arrive by \
boat should report to the office before they unload anything. A small fee is charged for each night, and the money is \
used to repair the pier, the lamps and the old crane. Dogs are welcome on the pier but must be kept on a lead. If you \
need water or fuel, ask the harbour master, who will show you where the pumps are and how they work."""
QUESTION = f"Repeat this text exactly, word for word, but correct any spelling mistakes:\n\n{TEXT}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to write at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packed", action="store_true", help="leave packed weights packed")
    given = parser.parse_args()
    lm = dense(given.model, given.dtype, given.packed)
    ids = lm.chat([{"role": "user", "content": QUESTION}])
    list(lm.generate(ids, max_tokens=4))  # weights are read when they are first used
    rates: dict[str, list[float]] = {"plain": [], "lookup": []}
    for _ in range(given.rounds):
        for name, found in rates.items():
            made = lm.generate(ids, max_tokens=given.tokens, draft=None if name == "plain" else name)
            list(made)
            found.append(made.stats.rate)
    counts = made.stats.speculation
    plain, lookup = (statistics.median(found) for found in rates.values())
    print_table(["", "tokens/s", "ratio"], [("plain", plain, 1.0), ("lookup", lookup, lookup / plain)])
    print(f"{made.stats.tokens} tokens in {counts.passes} passes, {counts.accepted} of {counts.proposed} guesses right")
    print(made.text)


if __name__ == "__main__":
    main()
