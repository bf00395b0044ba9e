"""Tokens per second of reading a prompt and of writing, under settings side by side.

    python tests/bench/decode_speed.py [MODEL] [--dtype float32] [--prompt 1024] [--tokens 64] [--rounds 3]

The settings take turns, each in a process of its own, so that a busy machine slows all of them alike: look at the
ratios to the first row, not at the figures. The prompt is random ids. On Linux one row does without the system's BLAS
(`MLX_TFORMER_BLAS=off`); the others read the prompt in chunks of another size.
"""

import argparse
import statistics
import sys

from measuring import measured, print_table

SPEED = """
import json, random, sys
import mlx_tformer as mt
from mlx_tformer.generation import decode

model, dtype, length, tokens, chunk = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
decode.CHUNK = chunk
lm = mt.load(model, dtype=dtype)
length = min(length, lm.context - tokens)
prompt = [random.Random(0).randrange(lm.vocab) for _ in range(length)]
list(lm.generate(prompt[:16], max_tokens=4, stop_at_end=False))  # weights are read when they are first used
made = lm.generate(prompt, max_tokens=tokens, stop_at_end=False)
list(made)
print(json.dumps([made.stats.prompt_rate, made.stats.rate, made.stats.peak_bytes]))
"""
NO_BLAS = {"MLX_TFORMER_BLAS": "off"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    settings = {f"chunks of {size}": (size, {}) for size in (512, 64, 256, 2048)}
    if sys.platform.startswith("linux"):
        settings["chunks of 512, no BLAS"] = (512, NO_BLAS)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    for _ in range(given.rounds):
        for name, (chunk, env) in settings.items():
            arguments = (given.model, given.dtype, given.prompt, given.tokens, chunk)
            found[name].append(measured(SPEED, *arguments, env=env))
    best = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in found.items()}
    first = next(iter(best.values()))
    rows = [
        (name, prompt, prompt / first[0], write, write / first[1], peak / 1e6)
        for name, (prompt, write, peak) in best.items()
    ]
    print_table(["", "prompt t/s", "ratio", "writing t/s", "ratio", "peak MB"], rows)


if __name__ == "__main__":
    main()
