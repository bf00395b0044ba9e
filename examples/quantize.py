"""What quantizing costs: the same model with 8 and with 4 bits, its size, and how far its predictions move.

python examples/quantize.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import mlx.core as mx

import mlx_tformer as mt

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
text = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer"


def log_probabilities(lm: mt.LanguageModel) -> mx.array:
    logits = lm(lm.tokens(text).array).astype(mx.float32)  # (1, L, V)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


plain = log_probabilities(mt.load(model, dtype="float32"))
print("bits a weight        MB   mean KL   same best token")
with tempfile.TemporaryDirectory() as folder:
    for bits in (None, 8, 4):
        made = mt.convert(model, Path(folder) / f"{bits}", quantize=bits)
        other = log_probabilities(mt.load(made.path, dtype="float32"))
        divergence = (mx.exp(plain) * (plain - other)).sum(axis=-1).mean().item()
        agreement = (plain.argmax(axis=-1) == other.argmax(axis=-1)).mean().item()
        print(f"{made.bits_per_weight:13.2f} {made.nbytes / 1e6:9.2f} {divergence:9.5f} {agreement:17.0%}")
