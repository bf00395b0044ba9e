"""Where a long document is read while a model writes on: the weight on each stretch of it, token by token.

python examples/long_document.py [MODEL [FILE [PICTURE.png]]]

Without a file the document is one that the model writes first. No pattern is ever held, whatever the length.
"""

import sys
from pathlib import Path

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import pictures

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
lm = mt.load(model, dtype="float32")
if len(sys.argv) > 2:
    tokens = lm.tokens(Path(sys.argv[2]).read_text())
else:
    written = lm.generate("ROMEO:\n", max_tokens=300, temperature=0.8, seed=3, stop_at_end=False)
    tokens = lm.tokens("ROMEO:\n" + "".join(step.text for step in written))

watch = inspect.stats(top=3, mass=tokens.spans(every=max(len(tokens) // 16, 1)), keep=64)
made = lm.generate(tokens, max_tokens=24, stop_at_end=False, watch=watch)
steps = [step.text for step in made]
print(f"{len(tokens)} tokens were read, and led to {''.join(steps)!r}")

last = len(tokens) - 1  # the query that led to the first new token
spans = watch.span_map([repr(lm.tokenizer.token_text(i))[1:-1] for i in made.tokens], first=last)
pictures.show(spans)
if len(sys.argv) > 3:
    pictures.png(spans, sys.argv[3])

print("layer  entropy  distance  what the last query looks at most")
for layer, path in enumerate(watch.paths):
    found = watch[path]
    keys = found.top_keys[0, found.top_weights[0, :, -1, 0].argmax(), -1]  # of the head with the largest weight
    looked_at = [lm.tokenizer.token_text([*tokens, *made.tokens][key]) for key in keys]
    print(f"{layer:5}  {found.entropy.mean():7.2f}  {found.distance.mean():8.1f}  {looked_at}")

whole = sum(watch[path].seen * watch[path].entropy.shape[1] for path in watch.paths) * len(tokens)
print(f"kept: {watch.nbytes} bytes; the patterns would be {4 * whole} bytes")
