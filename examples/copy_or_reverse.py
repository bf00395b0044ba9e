"""The Transformer of 2017 learns to reverse digits, and its cross-attention shows how: from the last to the first.

python examples/copy_or_reverse.py [copy|reverse]
"""

import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

import mlx_tformer as mt
from mlx_tformer.nn import watch
from mlx_tformer.training import cross_entropy

START, LENGTH, BATCH, STEPS = 10, 8, 48, 240  # the digits are ids 0 to 9
reverse = sys.argv[1:2] != ["copy"]

lm = mt.build("transformer", dim=64, heads=2, layers=1, hidden=128, vocab=11, initializer_range=64**-0.5, seed=1)
rates = [optim.linear_schedule(0, 5e-3, 30), optim.cosine_decay(5e-3, STEPS - 30)]
optimizer = optim.Adam(optim.join_schedules(rates, [30]), betas=[0.9, 0.98])


def pair(key: mx.array, count: int = BATCH) -> tuple[mx.array, mx.array]:
    """Digits (B, L), and the same in the order in which they are to be written."""
    source = mx.random.randint(0, 10, (count, LENGTH), key=key)
    return source, source[:, ::-1] if reverse else source


def loss(model: nn.Module, source: mx.array, target: mx.array) -> mx.array:
    before = mx.concatenate([mx.full((len(target), 1), START), target[:, :-1]], axis=1)
    return cross_entropy(model(source, decoder_input_ids=before), target)


step = nn.value_and_grad(lm.model, loss)
for number, key in enumerate(mx.random.split(mx.random.key(0), STEPS)):
    value, gradients = step(lm.model, *pair(key))
    optimizer.update(lm.model, gradients)
    mx.eval(lm.model.parameters(), optimizer.state)
    if number % 50 == 49:
        print(f"step {number + 1}: {value.item():.3f} nats a digit")

source, target = pair(mx.random.key(99), 200)  # digits that it has not seen: there are 10**8
memory, cache, written = lm.model.encode(source), lm.new_cache(), [mx.full((200, 1), START)]
patterns: list[mx.array] = []
with watch("decoder.layers.0.cross.op.pattern", lambda _, pattern: patterns.append(pattern)):
    for _ in range(LENGTH):  # one digit at a time, each the likeliest
        logits = lm.model.logits(lm.model.decode(written[-1], memory, cache))
        written.append(logits.argmax(axis=-1))
found = mx.concatenate(written[1:], axis=1)
accuracy = (found == target).mean().item()
print(f"{source[0].tolist()} -> {found[0].tolist()}; {accuracy:.1%} of the digits of 200 texts are right")

looks = mx.concatenate(patterns, axis=2).mean(axis=(0, 1))  # (L, S): where each written digit looks
print("each row is a written digit, each column a read one:")
for row in looks.tolist():
    print("".join(" ░▒▓█"[min(4, int(weight * 5))] * 2 for weight in row))
best = looks.argmax(axis=-1).tolist()
assert accuracy > 0.95, accuracy
assert best == (list(range(LENGTH))[::-1] if reverse else list(range(LENGTH))), best
