"""One scale of colours for all pictures: from nothing to a strong blue, and red for values below zero."""

Colour = tuple[int, int, int]
LIGHT: tuple[Colour, ...] = ((255, 255, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
DARK: tuple[Colour, ...] = ((16, 18, 24), (20, 52, 96), (30, 100, 170), (90, 170, 230), (220, 240, 255))
LIGHT_BELOW: tuple[Colour, ...] = ((255, 255, 255), (252, 210, 190), (240, 140, 110), (200, 50, 40), (110, 0, 15))
DARK_BELOW: tuple[Colour, ...] = ((16, 18, 24), (80, 30, 25), (150, 50, 35), (225, 110, 80), (255, 225, 210))
RAMP = " .:-=+*#%@"
"""The same scale in ASCII."""


def share(value: float, bounds: tuple[float, float]) -> float:
    """Where a value stands between zero and the end of the scale on its side, from -1 to 1; what is not finite is 0.

    >>> share(0.25, (0.0, 0.5)), share(-1.0, (-2.0, 2.0)), share(float("nan"), (0.0, 1.0))
    (0.5, -0.5, 0.0)
    """
    low, high = bounds
    if not abs(value) < float("inf"):
        return 0.0
    at = value / high if value >= 0 else -value / low
    return max(-1.0, min(1.0, at))


def colour(at: float, dark: bool) -> Colour:
    """The colour of a share from -1 to 1.

    >>> colour(0.0, dark=False), colour(1.0, dark=False)
    ((255, 255, 255), (8, 48, 107))
    """
    stops = (DARK if dark else LIGHT) if at >= 0 else (DARK_BELOW if dark else LIGHT_BELOW)
    place = abs(at) * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    a, b, part = stops[first], stops[first + 1], place - first
    return _mix(a[0], b[0], part), _mix(a[1], b[1], part), _mix(a[2], b[2], part)


def ink(background: Colour) -> Colour:
    """Black or white, whichever contrasts more with a background (relative luminance, WCAG 2)."""
    red, green, blue = (_linear(part / 255) for part in background)
    return (0, 0, 0) if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else (255, 255, 255)


def letter(at: float) -> str:
    """The sign of the ASCII scale for a share; below zero it counts by size.

    >>> letter(0.0), letter(0.5), letter(-1.0)
    (' ', '+', '@')
    """
    return RAMP[round(abs(at) * (len(RAMP) - 1) + 1e-9)]


def _mix(a: int, b: int, part: float) -> int:
    return round(a + (b - a) * part)


def _linear(part: float) -> float:
    return float(part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
