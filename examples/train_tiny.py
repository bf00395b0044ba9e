"""A tiny Llama learns a few answers: questions and answers are packed into rows, the answers alone are predicted, and
the trained model is saved, loaded and asked.

python examples/train_tiny.py
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

import mlx_tformer as mt
from mlx_tformer.training import Packed, next_token_loss, pack

LENGTH, STEPS = 48, 60
FACTS = {
    "Who wrote Hamlet?": " Shakespeare.",
    "Where is the prince from?": " Denmark.",
    "Who loves Romeo?": " Juliet.",
    "Where do they live?": " Verona.",
    "Who kills Duncan?": " Macbeth.",
    "What comes to Dunsinane?": " The wood.",
    "Who is the moor?": " Othello.",
    "Who lies to him?": " Iago.",
    "How many daughters has Lear?": " Three.",
    "Who loves him most?": " Cordelia.",
}

tokenizer = mt.load("shakespeare").tokenizer
assert tokenizer is not None and tokenizer.eos_id is not None
lm = mt.build("llama", dim=64, layers=2, heads=4, kv_heads=2, vocab=tokenizer.size, tied=True, initializer_range=0.1)
lm.tokenizer = tokenizer

questions = [tokenizer.encode(question) for question in FACTS]
answers = [[*tokenizer.encode(answer), tokenizer.eos_id] for answer in FACTS.values()]
texts = [question + answer for question, answer in zip(questions, answers, strict=True)]
packed = pack(texts, LENGTH, loss_from=[len(question) for question in questions])
full = sum(map(len, texts)) / packed.ids.size
print(f"{len(texts)} texts in {len(packed.ids)} rows of {LENGTH} tokens, {full:.0%} of them text; ", end="")
print(f"{packed.loss_mask.sum().item()} tokens are to be predicted")


def loss(model: nn.Module, batch: Packed) -> mx.array:
    return next_token_loss(model(batch.ids, segments=batch.segments), batch.ids, loss_mask=batch.loss_mask)


optimizer = optim.AdamW(optim.cosine_decay(5e-3, STEPS), weight_decay=0.01)
step = nn.value_and_grad(lm.model, loss)
for number in range(STEPS):
    value, gradients = step(lm.model, packed)
    gradients, _ = optim.clip_grad_norm(gradients, 1.0)
    optimizer.update(lm.model, gradients)
    mx.eval(lm.model.parameters(), optimizer.state)
    if number % 20 == 19:
        print(f"step {number + 1}: {value.item():.4f} nats a token")

with tempfile.TemporaryDirectory() as folder:
    again = mt.load(mt.save(lm, Path(folder) / "tiny"))
    said = {question: "".join(step.text for step in again.generate(question, max_tokens=12)) for question in FACTS}
for question, answer in said.items():
    print(f"{question:<30}{answer}")
assert said == FACTS, said
