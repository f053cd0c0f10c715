"""The server's counters and histograms, and their exposition for Prometheus."""

from jaxserve.server.metrics.histogram import Histogram, RecentHistogram
from jaxserve.server.metrics.recorder import EVENTS, STATES, Event, ImageCounts, ServerMetrics, Tally

__all__ = ["EVENTS", "STATES", "Event", "Histogram", "ImageCounts", "RecentHistogram", "ServerMetrics", "Tally"]
