"""What can be drawn: in the terminal, as PNG, as a page; see `pictures`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    import numpy as np

    from .pictures import Picture


def numbers(values: mx.array) -> "np.ndarray[tuple[Any, ...], np.dtype[np.float32]]":
    """What pictures are made of."""
    import numpy as np

    return np.array(values.astype(mx.float32))


class Drawn(ABC):
    """Something that has a picture; whatever chooses among several is passed on to `picture`."""

    @abstractmethod
    def picture(self) -> "Picture":
        """The numbers, with a title and labels."""

    def show(self, **which: Any) -> None:
        """Print the picture to the terminal."""
        from .pictures import show

        show(self.picture(**which))

    def png(self, path: str | Path, *, dpi: int = 150, **which: Any) -> None:
        """Write the picture to a PNG file; raises UsageError without matplotlib."""
        from .pictures import png

        png(self.picture(**which), path, dpi=dpi)

    def html(self, path: str | Path, *, title: str = "mlx_tformer", **which: Any) -> None:
        """Write the picture to a page that needs nothing else."""
        from .pictures import write_page

        write_page(self.picture(**which), path, title=title)
