"""Six ways to tell where tokens stand, on texts longer than any in training: which token came before this one?

python examples/positions.py
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_tformer.nn import (
    LM,
    Alibi,
    Attention,
    Block,
    Embed,
    GatedMlp,
    Learned,
    Position,
    RelativeBias,
    Residual,
    RMSNorm,
    Rope,
    Sinusoidal,
    Stack,
)
from mlx_tformer.training import cross_entropy, initialise

VOCAB, DIM, HEADS, LENGTH, STEPS = 8, 32, 8, 16, 100


def model_of(position: Position | None = None, added: Learned | Sinusoidal | None = None) -> LM:
    """One layer: its position turns queries and keys or is added to scores, or vectors are added to the tokens'."""
    block = Block(
        attn=Residual(Attention(DIM, HEADS, position=position), pre=RMSNorm(DIM)),
        mlp=Residual(GatedMlp(DIM, 2 * DIM), pre=RMSNorm(DIM)),
    )
    model = LM(Embed(VOCAB, DIM, positions=added), Stack([block], RMSNorm(DIM)))
    initialise(model, std=DIM**-0.5)
    return model


def run(model: LM, ids: mx.array) -> tuple[mx.array, mx.array]:
    """The loss of a batch (B, L), and how often the token before is told right."""
    logits, wanted = model(ids)[:, 1:], ids[:, :-1]
    return cross_entropy(logits, wanted), (logits.argmax(axis=-1) == wanted).mean()


def train(model: LM) -> None:
    optimizer, step = optim.Adam(1e-2), nn.value_and_grad(model, run)
    for key in mx.random.split(mx.random.key(1), STEPS):
        _, gradients = step(model, mx.random.randint(0, VOCAB, (40, LENGTH), key=key))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)


schemes = {
    "sinusoidal": model_of(added=Sinusoidal(DIM, interleaved=True)),
    "learned": model_of(added=Learned(4 * LENGTH, DIM)),
    "RoPE": model_of(Rope(DIM // HEADS)),
    "ALiBi": model_of(Alibi(HEADS)),
    "T5 bias": model_of(RelativeBias(16, HEADS, LENGTH, causal=True)),
    "none": model_of(),
}
print(f"trained on {LENGTH} tokens; loss in nats and accuracy at {LENGTH}, {2 * LENGTH} and {4 * LENGTH}")
found: dict[str, list[float]] = {}
for name, model in schemes.items():
    train(model)
    measured = [
        run(model, mx.random.randint(0, VOCAB, (32, times * LENGTH), key=mx.random.key(2))) for times in (1, 2, 4)
    ]
    found[name] = [accuracy.item() for _, accuracy in measured]
    print(f"{name:>10} " + "  ".join(f"{loss.item():6.2f} {accuracy.item():5.0%}" for loss, accuracy in measured))

short, long = ({name: values[at] for name, values in found.items()} for at in (0, 2))
assert min(short["learned"], short["RoPE"], short["T5 bias"]) > 0.95, short
assert min(long["T5 bias"], long["ALiBi"]) > 0.8, long  # what is near stays near, however long the text is
assert max(long["learned"], long["none"]) < 0.6, long  # no vectors were learned for places that were never seen
