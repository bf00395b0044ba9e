"""How much a cache keeps, and in what form: all of it, packed into few bits, or a bounded number of tokens."""

from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Keeping:
    """What a caller asks of a cache.

    bits: pack keys and values into 4 or 8 bits a number (None: as they are), as soon as a text has more than `start`
    tokens. Layers with a window, latents and state spaces are kept as they are: they are small already. size: keep no
    more than so many tokens of a text (None: all): the first `keep`, which attention leans on (Xiao et al. 2023, arXiv
    2309.17453), and the last ones. Tokens keep their positions, so the context is no longer than it was.

    >>> Keeping(size=4, keep=4)
    Traceback (most recent call last):
    mlx_tformer.errors.UsageError: kv_keep: found 4, expected a whole number from 0 to 3, less than kv_size
    """

    bits: int | None = None
    start: int = 0
    size: int | None = None
    keep: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8):
            raise UsageError(f"kv_bits: found {self.bits}, expected 4 or 8")
        _expect_whole("kv_start", self.start, 0)
        if self.size is None:
            if self.keep:
                raise UsageError("kv_keep: it needs kv_size, the number of tokens that are kept in all")
            return
        _expect_whole("kv_size", self.size, 1)
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or not 0 <= self.keep < self.size:
            expected = f"a whole number from 0 to {self.size - 1}, less than kv_size"
            raise UsageError(f"kv_keep: found {self.keep}, expected {expected}")
        if self.bits is not None:
            raise UsageError("kv_bits: it does not go together with kv_size; choose one")

    def bounds(self, window: int | None) -> bool:
        """Whether `size` is less than what a layer with this window (None: without one) keeps anyway."""
        return self.size is not None and (window is None or window > self.size)


def _expect_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: found {value}, expected a whole number of {least} or more")


WHOLE = Keeping()
"""Everything, as it is."""
