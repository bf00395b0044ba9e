"""Pictures as one HTML page that needs nothing else: no network, no server, every number in it as float32."""

import base64
import html as markup
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputOutputError, UsageError
from .colours import DARK, DARK_BELOW, LIGHT, LIGHT_BELOW
from .picture import SINK, Grid, Heads, Picture, Values, printable

MOST = 16_000_000
"""Values on a page: 64 MB, which a browser still opens."""


def write_page(pictures: Picture | Sequence[Picture], path: str | Path, *, title: str = "mlx_tformer") -> None:
    """Write pictures to a page, whole or not at all; into a pipe or a device as it comes.

    Raises UsageError for more values than a browser likes, and InputOutputError where the file cannot be written.
    """
    text, target = page(pictures, title=title).encode(), Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(text)
            return
        target = target.resolve()  # so that a link stays one
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(text)
            Path(partial).chmod(0o644)
            Path(partial).replace(target)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(partial).unlink()
            raise
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from None


def page(pictures: Picture | Sequence[Picture], *, title: str = "mlx_tformer") -> str:
    """The page itself. Tokens and titles are data in it and never markup."""
    several = [pictures] if isinstance(pictures, Grid | Heads) else list(pictures)
    if not several:
        raise UsageError("pictures: found none, expected one or more")
    count = sum(_count(picture) for picture in several)
    if count > MOST:
        raise UsageError(f"the page would hold {count:,} values, more than {MOST:,}; choose layers, heads or tokens")
    scales = {"light": LIGHT, "dark": DARK, "lightBelow": LIGHT_BELOW, "darkBelow": DARK_BELOW}
    data = {"title": title, "scales": scales, "pictures": [_data(picture) for picture in several]}
    parts = {name: (files(__package__) / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    # Within a script element nothing but "<" can end it or begin a comment.
    parts["data"] = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    parts["title"] = markup.escape(title)
    text = parts.pop("html")
    head, css, rest = text.partition("/*css*/")
    body, js, tail = rest.partition("/*js*/")
    assert css and js
    return "".join([_filled(head, parts), parts["css"], _filled(body, parts), parts["js"], tail])


def _filled(template: str, parts: dict[str, str]) -> str:
    for name in ("title", "data"):
        before, mark, after = template.partition(f"{{{{{name}}}}}")
        template = before + parts[name] + after if mark else template
    return template


def _count(picture: Picture) -> int:
    return picture.values.size if isinstance(picture, Grid) else sum(p.size for p in picture.patterns.values())


def _data(picture: Picture) -> dict[str, Any]:
    if isinstance(picture, Grid):
        return {
            "kind": "grid",
            "title": picture.title,
            "rows": [printable(label) for label in picture.rows],
            "columns": [printable(label) for label in picture.columns],
            "down": picture.down,
            "across": picture.across,
            "text": None if picture.text is None else [[printable(cell) for cell in row] for row in picture.text],
            "bounds": picture.bounds,
            "values": _packed(picture.values),
        }
    return {
        "kind": "heads",
        "title": picture.title,
        "notes": list(picture.notes),
        "first": picture.first,
        "seen": len(picture.keys) - (picture.keys[-1] == SINK),
        "queries": [printable(label) for label in picture.queries],
        "keys": [printable(label) for label in picture.keys],
        "layers": [
            {"name": layer, "heads": len(pattern), "values": _packed(pattern)}
            for layer, pattern in picture.patterns.items()
        ],
    }


def _packed(values: Values) -> str:
    """Float32 numbers, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(values).astype("<f4").tobytes()).decode()
