"""Pictures of numbers that were read from a model, the same in the terminal, as PNG and as a page.

Read in this order: `picture` (what is drawn), `colours`, `terminal`, `png`, `page` (with `page.html`, `page.css` and
`page.js`).
"""

from .page import page, write_page
from .picture import Grid, Heads, Picture
from .png import figure, needs_matplotlib, png
from .terminal import show

__all__ = ["Grid", "Heads", "Picture", "figure", "needs_matplotlib", "page", "png", "show", "write_page"]
