"""Text from a model: streamed, with the log-probability of each token.

python examples/generate.py [MODEL [PROMPT]]
"""

import sys

import mlx_tformer as mt

model = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
prompt = sys.argv[2] if len(sys.argv) > 2 else "ROMEO:\n"

lm = mt.load(model)
tokens = lm.tokens(prompt)
print(tokens.table())

generation = lm.generate(tokens, max_tokens=60, temperature=0.8, top_p=0.95, seed=1)
print(prompt, end="")
surprise = 0.0
for step in generation:
    print(step.text, end="", flush=True)
    surprise -= step.logprob
print(f"\n\n{surprise / len(generation.tokens):.2f} nats a token, {generation.stats.rate:.0f} tokens per second")

best = "".join(step.text for step in lm.generate(tokens, max_tokens=10))
print("the most likely continuation:", repr(best))
