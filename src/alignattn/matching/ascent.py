"""A critic that ascends what its tokens descend, by the kernels of its highway.

Its weights turn the gradient round, not the tokens: they are few. Where no kernels serve: carriers.py.
"""

from jaxtyping import Float
from torch import Tensor

from alignattn.matching.linear import linear
from alignattn.matching.networks import Discriminator, Rows, reverse_gradient


def ascending(
    network: Discriminator, tokens: Float[Tensor, "l t d"], layers: Rows, *, products: str
) -> Float[Tensor, "l t o"]:
    """reverse_gradient(network(reverse_gradient(tokens)))."""
    from alignattn.matching.kernels.highway import features

    *trunk, to_out, out = (reverse_gradient(weight) for weight in network.weights(tokens, layers))
    return linear(features(products, tokens, *trunk), to_out, out)
