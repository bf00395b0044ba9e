"""Text to ids and back, and conversations to prompts: `tokenizer` is what the rest of the package uses.

`files` reads a tokenizer's files (`sentencepiece` some of them), `stream` gives text for ids as they come, `control`
keeps special tokens in a user's text plain, `template` runs chat templates in a `sandbox` with limits (`guard`),
`spans` divides a text into parts to count attention by, and `spelling` tells the bytes of each token.
"""

from .spans import Spans
from .stream import TextStream
from .tokenizer import Tokenizer, Tokens

__all__ = ["Spans", "TextStream", "Tokenizer", "Tokens"]
