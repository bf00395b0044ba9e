"""Which experts a mixture sends each token to, and whether a token has experts of its own.

python examples/experts_by_token.py [MODEL [LAYER [PICTURE.png]]]
python examples/experts_by_token.py allenai/OLMoE-1B-7B-0924 0 experts.png

Without a MODEL a random mixture of experts (Mixtral's parts) reads the bundled model's tokens.
"""

import sys
from itertools import combinations

import numpy as np

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import pictures

if len(sys.argv) > 1 and sys.argv[1] != "random":
    lm = mt.load(sys.argv[1])
else:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    lm = mt.build("mixtral", dim=64, layers=3, heads=4, kv_heads=2, hidden=96, vocab=2048, **sizes)
    lm.tokenizer = mt.load("shakespeare").tokenizer
tokens = lm.tokens("To be, or not to be: to die, to sleep; to sleep, and not to dream.")
with inspect.trace(lm, read=["router.*"]) as t:
    lm(tokens)

print(f"{lm.origin}: {len(tokens)} tokens")
for report in inspect.experts(t):
    share = "  ".join(f"{count:3}" for count in report.load.tolist()[:16])
    print(f"layer {report.layer}: balance {report.balance:.2f}, unused {len(report.unused)}, loads {share}")
    top = t.by_layer("router.chosen")[report.layer].shape[-1]
    assert report.load.sum().item() == top * len(tokens) and not report.dropped

layer = int(sys.argv[2]) if len(sys.argv) > 2 else t.layers[0]
chosen, weights = (np.array(t.by_layer(f"router.{name}")[layer])[0] for name in ("chosen", "weights"))
table = np.zeros((len(tokens), len(inspect.experts(t)[0].load.tolist())), np.float32)
np.put_along_axis(table, chosen, weights, axis=1)
names = [str(i) for i in range(table.shape[1])]
grid = pictures.Grid(f"weights of experts, layer {layer}", table, t.labels(), names, down="token", across="expert")
pictures.show(grid)
if len(sys.argv) > 3:
    pictures.png(grid, sys.argv[3])

# How many experts two tokens share, as a share of those that one has.
shared = {(i, j): len({*chosen[i]} & {*chosen[j]}) / len(chosen[i]) for i, j in combinations(range(len(tokens)), 2)}
same = np.mean([x for (i, j), x in shared.items() if tokens[i] == tokens[j]])
others = np.mean([x for (i, j), x in shared.items() if tokens[i] != tokens[j]])
print(f"experts shared by the same token at two places: {same:.0%}, by two tokens: {others:.0%}")
assert same > others, "who a token is decides, more than where it stands"
