"""Where a model keeps who gets the drink: each piece of one run put into another, one at a time.

python examples/indirect_object.py [MODEL [PICTURE.png]]
python examples/indirect_object.py HuggingFaceTB/SmolLM2-135M-Instruct patching.png

In "When Henry and John went to the store, John gave a drink to" it is Henry; if Henry gives, it is John. Activation
patching (Meng et al. 2022, arXiv 2202.05262) restores one layer's residual stream at one token of the first text in a
run of the second, and asks how much of the first one's answer comes back: 0 is none, 1 is all (Wang et al. 2022, arXiv
2211.00593, have the circuit in GPT-2). The bundled model stands in without a MODEL; it has the names, not the skill.
"""

import sys
from dataclasses import replace
from pathlib import Path

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import pictures

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
lm = mt.load(model, dtype="float32")
clean = lm.tokens("When Henry and John went to the store, John gave a drink to")
other = lm.tokens("When Henry and John went to the store, Henry gave a drink to")
answer = (" Henry", " John")  # the distance of their logits
changed = next(i for i, (a, b) in enumerate(zip(clean, other, strict=True)) if a != b)

stream = inspect.sweep(lm, clean, other, answer, site="residual.out", over="positions")
print(f"{lm.origin}: logit of Henry less that of John: {stream.clean:+.2f}, and {stream.corrupted:+.2f} if Henry gives")
print("it knows who" if stream.clean > 0 > stream.corrupted else "it does not know who")
words = [lm.tokenizer.token_text(i) for i in clean]
picture = replace(
    stream.picture(),
    title=f"share of the answer that comes back, {Path(lm.origin).stem}",
    columns=words,
    across="token",
)
pictures.show(picture)
if len(sys.argv) > 2:
    pictures.png(picture, sys.argv[2])

heads = inspect.sweep(lm, clean, other, answer, site="attn.z", over="heads")
print("the heads that bring back most (layer.head: share):")
print(", ".join(f"{layer}.{head}: {share:.2f}" for layer, head, share in heads.top(8)))

table = stream.recovered
assert abs(table[-1, -1].item() - 1) < 1e-3, "the last layer's last token is all that the logits are made of"
assert abs(table[:, :changed]).max().item() < 1e-3, "what comes before the change is the same in both"
at_first, at_last = table[0].argmax().item(), table[-1].argmax().item()
assert at_first == changed and at_last == len(clean) - 1, "the answer moves from who gives to the end of the sentence"
