"""The mathematics as pure functions on tensors, usable without a model.

Queries are [b, h, n, d] and keys [b, h, m, d]; masks are boolean [b, n] and [b, m], True = valid. Each returns one
value a problem, [b, h]: one sample in one head. Half precision is computed in fp32.
"""

from alignattn.matching.adversarial import adversarial
from alignattn.matching.conditional import conditional_transport
from alignattn.matching.discrepancy import mmd
from alignattn.matching.features import feature_distance
from alignattn.matching.neighbourhoods import neighbourhood_transport
from alignattn.matching.transport import TransportResult, optimal_transport

__all__ = [
    "TransportResult",
    "adversarial",
    "conditional_transport",
    "feature_distance",
    "mmd",
    "neighbourhood_transport",
    "optimal_transport",
]
