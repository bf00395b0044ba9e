"""Make a small SentencePiece vocabulary as Marian's folders have it, and ask transformers for the answers.

Run with Python that has `transformers` (5.24 was used) and `sentencepiece`, without `sacremoses`, which would change
punctuation: `python tests/data/marian/make.py`. The vocabulary lacks some of the pieces, and has others that only the
target's side has.
"""

import gzip
import io
import json
from os import chdir
from pathlib import Path

import sentencepiece
from transformers import MarianTokenizer

HERE = Path(__file__).resolve().parent
WORDS = gzip.decompress((HERE.parent / "shakespeare_words.txt.gz").read_bytes()).decode().split()
RULES = "C0\t41\n9\t20\nA0\t20\nA\t20\nFF21\t41\nFB01\t66 69\n2026\t2E 2E 2E\n"
TEXTS = [
    "",
    " ",
    "To be, or not to be",
    "  two spaces  inside and after  ",
    "\u00c0 la \uff21\ufb01n\u2026",
    "line\nbreak\r\nand\ttab",
    "h\u00e9llo w\u00f6rld \u4e2d\u6587 \U0001f469\u200d\U0001f467 end",
    ">>fra<< Speak, I charge thee, speak!",
    ">>fra<<glued",
    ">>xyz<< Unknown language",
    "\u2581under \u2581score",
    "the King; the Queen. 'Tis thou, 12345?",
    "xqzj  vwk",
    "a",
]


def main() -> None:
    chdir(HERE)
    Path("rules.tsv").write_text(RULES)
    lines = [" ".join(WORDS[i : i + 9]) for i in range(0, len(WORDS) - 9, 9)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        normalization_rule_tsv="rules.tsv",  # a bare name, since the vocabulary remembers it
        character_coverage=0.999,
        num_threads=1,
        minloglevel=2,
    )
    Path("rules.tsv").unlink()
    for name in ("source.spm", "target.spm"):
        (HERE / name).write_bytes(model.getvalue())
    known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [known.id_to_piece(i) for i in range(3, known.get_piece_size())]
    kept = [piece for i, piece in enumerate(pieces) if i % 17]
    vocab = ["</s>", "<unk>", *kept, "\u4e2d\u6587", "\u2581monde", ">>fra<<", ">>deu<<", "<pad>"]
    (HERE / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocab)}), "utf-8")
    (HERE / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "fr"}), "utf-8")
    theirs = MarianTokenizer.from_pretrained(HERE)
    texts = [*TEXTS, *lines[:: len(lines) // 40]]
    ids = [theirs(text).input_ids for text in texts]
    decoded = [theirs.decode(row, skip_special_tokens=True) for row in ids]
    rows = [{"text": a, "ids": b, "decoded": c} for a, b, c in zip(texts, ids, decoded, strict=True)]
    (HERE / "expected.json").write_text(json.dumps(rows, indent=0), "utf-8")
    (HERE / "target.spm").unlink()


main()
