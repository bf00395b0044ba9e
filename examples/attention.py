"""See where a head looks: its pattern, read while the model runs, as shades in the terminal.

python examples/attention.py [MODEL [LAYER [HEAD]]]
"""

import sys

import mlx.core as mx

import mlx_tformer as mt
from mlx_tformer.nn import watch

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
layer, head = (int(sys.argv[2]) if len(sys.argv) > 2 else 1), (int(sys.argv[3]) if len(sys.argv) > 3 else 0)

lm = mt.load(model, dtype="float32")
tokens = lm.tokens("To be, or not to be, that is the question")
seen: dict[str, mx.array] = {}
with watch(f"decoder.layers.{layer}.attn.op.pattern", seen.__setitem__):
    watched = lm(tokens.array)
pattern = next(iter(seen.values()))[0, head]  # (L, L), the rows sum to one

print(f"layer {layer}, head {head}: each row is a token, each column one that it looks at")
for text, row in zip(map(lm.tokenizer.token_text, tokens), pattern.tolist(), strict=True):
    print(f"{text!r:>14} {''.join(' ░▒▓█'[min(4, int(weight * 5))] * 2 for weight in row)}")

change = mx.abs(watched - lm(tokens.array)).max().item()
print(f"watching changed the logits by {change:.1e}")
