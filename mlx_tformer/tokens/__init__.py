"""Text to ids and back, and conversations to prompts: `tokenizer` is what the rest of the package uses.

`files` reads a tokenizer's files, `stream` gives text for ids as they come, `control` keeps special tokens in a
user's text plain, and `template` runs chat templates in a `sandbox` with limits (`guard`).
"""

from .stream import TextStream
from .tokenizer import Tokenizer, Tokens

__all__ = ["TextStream", "Tokenizer", "Tokens"]
