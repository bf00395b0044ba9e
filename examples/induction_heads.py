"""Which heads continue what was said before, and what the model is without them.

python examples/induction_heads.py [MODEL [PICTURE.png]]
python examples/induction_heads.py HuggingFaceTB/SmolLM2-135M-Instruct induction.png

Random tokens are said twice. Only a model with induction heads, which look at what followed the same token before
(Olsson et al. 2022, arXiv 2209.11895), has it easier the second time. The bundled model, which stands in without a
MODEL, is too small to have any.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import pictures

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
lm = mt.load(model, dtype="float32")
seeds, length = 2, 32
scores = inspect.head_scores(lm, ["induction", "previous"], seeds=seeds, length=length)
picture = replace(scores.picture("induction"), title=f"induction heads of {Path(lm.origin).stem}")
pictures.show(picture)
if len(sys.argv) > 2:
    pictures.png(picture, sys.argv[2])
print(f"{lm.origin}\n{scores}")

first, again = scores.losses
print(f"cross-entropy: {first:.2f} nats, and {again:.2f} when it is said again")
best = [(layer, head) for layer, head, _ in scores.best("induction", 6)]
# Heads that look at the previous token are a part of it: induction heads read what these have written.
previous = {(layer, head): score for layer, head, score in scores.best("previous", 10**6)}
rest = [(n, h) for n, h, score in scores.best("induction", 10**6) if max(score, previous[n, h]) < 0.3]
others = sorted(random.Random(0).sample(rest, 6))


def without(heads: list[tuple[int, int]]) -> float:
    """The loss of what is said again, with these heads taken out."""
    by_layer = {layer: [head for at, head in heads if at == layer] for layer, _ in heads}
    with inspect.editing(lm, [inspect.zero("attn.z", heads=by_layer)]):
        return inspect.head_scores(lm, ["induction"], seeds=seeds, length=length).losses[1]


losses = without(best), without(others)
print(f"without the 6 best induction heads: {losses[0]:.2f}; without 6 others: {losses[1]:.2f}")

has_heads = scores.best("induction", 1)[0][2] > 0.5
assert has_heads == (again < first / 2), "a model repeats what it read if and only if it has induction heads"
assert not has_heads or losses[0] - again > 2 * abs(losses[1] - again), "and it is these that do it"
