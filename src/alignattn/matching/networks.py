"""Discriminator, critic and navigator, for all layers of one head width at once.

    highway:        t = sigmoid(W_t x),  x' = t * relu(W_h x) + (1 - t) * x
    discriminator:  W_2 leaky_relu(W_1 x')        to one logit
    critic:         the same trunk, to `out` numbers
    navigator:      W_2 relu(W_1 x)               to `out` numbers

Zhang et al. 2021, section 2.3.1 and 2.3.3. Biases everywhere; the heads of a layer share one network. Weights are
kept as [layers, in, out], so one batched product serves every layer: the step is bound by launches, not arithmetic.

Each layer's weights are drawn from a generator seeded by its name. So the global random state is untouched, processes
agree without talking, and the same layer starts alike whichever others are attached.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignattn.matching import kernels
from alignattn.matching.highway import SLOPE
from alignattn.matching.linear import linear


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def reverse_gradient(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tensor itself; its gradient changes sign on the way back.

    Around a network on both sides, `reverse_gradient(network(reverse_gradient(x)))`, the network ascends what x
    descends, in one backward.
    """
    reversed_: Tensor = _ReverseGradient.apply(tensor)
    return reversed_


Rows = Int[Tensor, " l"] | slice | None  # of a bank of weights: whose serve which slice of tokens; None: all in order
PLAIN: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever the defaults of the process are


class LayeredLinear(nn.Module):
    """y = x W + b with a W and b for each layer; initialised as nn.Linear is, uniform in ±1/sqrt(in)."""

    def __init__(self, names: Sequence[str], width: int, out: int, *, seed: int, role: str) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        weights, biases = [], []
        for name in names:
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{role}/{name}".encode()))
            weights.append(torch.empty(width, out, **PLAIN).uniform_(-bound, bound, generator=generator))
            biases.append(torch.empty(1, out, **PLAIN).uniform_(-bound, bound, generator=generator))
        self.weight = nn.Parameter(torch.stack(weights))  # (layers, in, out)
        self.bias = nn.Parameter(torch.stack(biases))  # (layers, 1, out)

    def forward(self, tokens: Float[Tensor, "l t i"], layers: Rows, *, fixed: bool = False) -> Float[Tensor, "l t o"]:
        """`fixed`: no gradient goes into the weights."""
        return linear(tokens, *self.of(tokens, layers, fixed=fixed))

    def of(
        self, tokens: Float[Tensor, "*b _"], layers: Rows, *, fixed: bool
    ) -> tuple[Float[Tensor, "l i o"], Float[Tensor, "l 1 o"]]:
        """Weights and biases for these tokens."""
        weight, bias = self.weight.to(tokens), self.bias.to(tokens)
        if fixed:
            weight, bias = weight.detach(), bias.detach()
        return (weight, bias) if layers is None else (weight[layers], bias[layers])


class Discriminator(nn.Module):
    """Highway layer (or none) and a two-layer perceptron; with `out` > 1 it is the critic."""

    def __init__(
        self,
        names: Sequence[str],
        width: int,
        *,
        hidden: int,
        out: int,
        highway: bool = True,
        shared_gate: bool = False,
        seed: int = 0,
        role: str = "discriminator",
    ) -> None:
        super().__init__()
        self.leaky = highway  # the plain MLP of the paper's appendix has a ReLU instead
        self.transform = LayeredLinear(names, width, width, seed=seed, role=f"{role}.transform") if highway else None
        gate = highway and not shared_gate
        self.gate = LayeredLinear(names, width, width, seed=seed, role=f"{role}.gate") if gate else None
        self.first = LayeredLinear(names, width, hidden, seed=seed, role=f"{role}.first")
        self.second = LayeredLinear(names, hidden, out, seed=seed, role=f"{role}.second")

    def forward(
        self, tokens: Float[Tensor, "l t d"], layers: Rows = None, products: str = kernels.EXACT
    ) -> Float[Tensor, "l t o"]:
        outputs: Tensor = self.second(self.features(tokens, layers, products=products), layers)
        return outputs

    @property
    def has_highway(self) -> bool:
        """Whether its gradient is written out: not for the plain forms, nor for compiled code."""
        return self.transform is not None and self.gate is not None

    def weights(self, tokens: Float[Tensor, "*b d"], layers: Rows = None) -> list[Float[Tensor, "l _ _"]]:
        """Weights and biases of transform, gate, first and second layer in turn, for these tokens."""
        assert self.transform is not None and self.gate is not None
        parts = (self.transform, self.gate, self.first, self.second)
        return [tensor for part in parts for tensor in part.of(tokens, layers, fixed=False)]

    def features(
        self,
        tokens: Float[Tensor, "l t d"],
        layers: Rows = None,
        *,
        fixed: bool = False,
        products: str = kernels.EXACT,
    ) -> Float[Tensor, "l t hidden"]:
        """What the last layer is given. With `fixed` no gradient goes into the network."""
        if self.transform is not None and self.gate is not None and kernels.serve(tokens, widest=kernels.HIGHWAY):
            from alignattn.matching.kernels.highway import features

            parts = (self.transform, self.gate, self.first)
            weights = (tensor for part in parts for tensor in part.of(tokens, layers, fixed=fixed))
            return features(products, tokens, *weights)
        if self.transform is not None:
            transformed = self.transform(tokens, layers, fixed=fixed)
            gate = torch.sigmoid(transformed if self.gate is None else self.gate(tokens, layers, fixed=fixed))
            tokens = gate * F.relu(transformed) + (1 - gate) * tokens
        hidden = self.first(tokens, layers, fixed=fixed)
        return F.leaky_relu(hidden, SLOPE) if self.leaky else F.relu(hidden)


class Navigator(nn.Module):
    """Two-layer perceptron whose dot products say which key a query is carried to."""

    def __init__(self, names: Sequence[str], width: int, *, hidden: int, out: int, seed: int = 0) -> None:
        super().__init__()
        self.first = LayeredLinear(names, width, hidden, seed=seed, role="navigator.first")
        self.second = LayeredLinear(names, hidden, out, seed=seed, role="navigator.second")

    def forward(self, tokens: Float[Tensor, "l t d"], layers: Rows = None) -> Float[Tensor, "l t o"]:
        outputs: Tensor = self.second(F.relu(self.first(tokens, layers)), layers)
        return outputs

    def weights(self, tokens: Float[Tensor, "*b d"], layers: Rows = None) -> list[Float[Tensor, "l _ _"]]:
        """Weights and biases of first and second layer in turn, for these tokens."""
        return [tensor for part in (self.first, self.second) for tensor in part.of(tokens, layers, fixed=False)]
