"""Looking inside models. Statistics of attention over long texts, in this order: `streaming` (with `peaks`), `kept`,
`stats`."""

from .kept import LayerStatistics
from .stats import Watch, stats
from .streaming import Statistics, Wants, statistics_of, streamed

__all__ = ["LayerStatistics", "Statistics", "Wants", "Watch", "statistics_of", "stats", "streamed"]
