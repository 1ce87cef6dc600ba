"""Reaching the queries and keys inside a model. Knows models, never losses."""

from alignattn.capture.attending import Attending
from alignattn.capture.querykey import AttentionCall, Projected, QueryKey, Source
from alignattn.capture.site import Site
from alignattn.capture.tap import Tap

__all__ = ["Attending", "AttentionCall", "Projected", "QueryKey", "Site", "Source", "Tap"]
