"""Pictures: arrays in, matplotlib axes out, a list with one for each panel; nothing is shown.

The figure is `axes[0].figure`, and `save` takes either. Figures are made without pyplot: none is registered, none
needs a display, and rcParams stay as they are. Arrays and mappings are all that is asked for, so that a result file
serves as well as a model; `stored_curves`, `stored_distances` and `stored_bins` read them out of results.
"""

from alignattn.plots.attention import attention
from alignattn.plots.clouds import clouds
from alignattn.plots.curves import curves
from alignattn.plots.distances import distance_map
from alignattn.plots.embeddings import embeddings
from alignattn.plots.frontier import Point, frontier
from alignattn.plots.neighbourhood import neighbourhood
from alignattn.plots.received import received
from alignattn.plots.reliability import reliability
from alignattn.plots.saving import save
from alignattn.plots.stored import stored_bins, stored_curves, stored_distances

__all__ = [
    "Point",
    "attention",
    "clouds",
    "curves",
    "distance_map",
    "embeddings",
    "frontier",
    "neighbourhood",
    "received",
    "reliability",
    "save",
    "stored_bins",
    "stored_curves",
    "stored_distances",
]
