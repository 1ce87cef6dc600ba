"""Reaching the queries and keys inside a model. Knows models, never losses."""

from alignattn.capture.querykey import AttentionCall, Projected, QueryKey, Source
from alignattn.capture.site import Site
from alignattn.capture.tap import Tap

__all__ = ["AttentionCall", "Projected", "QueryKey", "Site", "Source", "Tap"]
