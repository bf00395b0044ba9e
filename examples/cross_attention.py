"""Where a decoder looks in what its encoder read, while it writes.

python examples/cross_attention.py [MODEL TEXT [PICTURE.png]]
python examples/cross_attention.py Helsinki-NLP/opus-mt-en-de "The black cat sleeps on the old sofa." cross.png

Without a MODEL it is the small one of copy_or_reverse.py, which is trained first and reverses digits; give "" for TEXT
then, to get a PICTURE.
"""

import sys
from dataclasses import replace

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import pictures

if len(sys.argv) > 2 and sys.argv[1]:
    lm = mt.load(sys.argv[1], dtype="float32")
    with inspect.trace(lm, read=["cross.pattern"]) as t:
        written = "".join(step.text for step in lm.generate(sys.argv[2], max_tokens=64))
    print(f"{lm.origin}: {written}")
else:
    from copy_or_reverse import START, lm, source, target

    with inspect.trace(lm, read=["cross.pattern"]) as t:
        lm(source[:1], decoder_input_ids=[START, *target[0].tolist()[:-1]])
    print(f"a model that has just learnt to reverse digits, and reads {source[0].tolist()}")

print(f"pattern @ values is the fused output, to {t.check(1e-4):.1e} of its largest value")
layer = t.layers[-1]
pattern = t.patterns(layer, crosses=True)[0]
# Row i is the query that led to token i of what was written.
grid = pictures.Grid(
    f"cross-attention of layer {layer}, mean of all heads",
    pattern.values.mean(axis=0),
    [*t.labels("decoder")[1 : len(pattern.queries)], "..."],
    pattern.keys,
    down="written next",
    across="read",
)
if len(sys.argv) < 3 or not sys.argv[1]:
    grid = replace(grid, rows=[str(digit) for digit in target[0].tolist()])
pictures.show(grid)
if len(sys.argv) > 3:
    pictures.png(grid, sys.argv[3])

assert abs(grid.values.sum(axis=1) - 1).max() < 1e-5
if len(sys.argv) < 3 or not sys.argv[1]:
    looked_at = [pattern.keys[i] for i in grid.values.argmax(axis=1)]
    assert looked_at == list(grid.rows), "each digit is read where it stands, from the last to the first"
