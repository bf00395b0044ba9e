"""Stop strings, found in the text and not in the tokens, so that it does not matter how a string is cut into tokens."""

from collections.abc import Sequence

from ..errors import UsageError


class StopStrings:
    """Passes text on up to the first stop string; text that could be the beginning of one is held back.

    >>> stop = StopStrings(["END"])
    >>> stop.add("the E"), stop.add("N"), stop.add("T ENDx")
    ('the ', '', 'ENT ')
    >>> stop.found
    True
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            strings = [strings]
        if any(not isinstance(string, str) or not string for string in strings):
            raise UsageError("stop: found an empty string, expected text to stop at")
        self.strings = tuple(strings)
        self.found = False
        self._held = ""

    def add(self, text: str) -> str:
        """The text that is safe to show after `text` came; sets `found` if a stop string is complete."""
        text, self._held = self._held + text, ""
        at = min((place for place in map(text.find, self.strings) if place >= 0), default=-1)
        if at >= 0:
            self.found = True
            return text[:at]
        keep = max((_overlap(text, string) for string in self.strings), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Characters at the end of `text` that `string` begins with, short of all of it."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
