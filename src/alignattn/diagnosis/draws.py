"""Random bits that are a function of seed, sample and token.

Neither how samples are batched nor padding nor the device changes them, and nobody's generator is touched. The function
is the finaliser of splitmix64 (Steele, Lea and Flood 2014) on 64-bit integers that wrap around.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 63  # of a number that are used: all but the sign


def mixed(*parts: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """A number for every combination of the parts, which broadcast."""
    state = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for part in parts:
        state = _scrambled((state ^ part) * 3 + _STEP)
    return state


def signs(seed: int, sample: int, tokens: int, count: int, device: torch.device) -> Float[Tensor, "n count"]:
    """+1 or -1, `count` of them for each token of a sample: the first is +1 throughout."""
    blocks = torch.arange(-(-count // BITS), device=device)
    numbers = mixed(*start(seed, sample, device), torch.arange(tokens, device=device)[:, None], blocks)  # (n, blocks)
    bits = numbers[..., None] >> torch.arange(BITS, device=device) & 1  # (n, blocks, BITS)
    found = 1.0 - 2.0 * bits.flatten(1)[:, :count].float()
    found[:, 0] = 1.0
    return found


def dealt(
    seed: int, sample: int, first: int, tokens: int, count: int, device: torch.device
) -> Float[Tensor, "t count"]:
    """One for as many tokens of a sample as `first` says, zero for others: the first ones, then some at random."""
    places = torch.arange(tokens, device=device)
    numbers = mixed(*start(seed, sample, device), places[:, None], torch.arange(count, device=device))  # (t, count)
    order = numbers.argsort(0).argsort(0)
    order[:, 0] = places
    return (order < first).float()


def start(seed: int, sample: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """What numbers are mixed of, first of all."""
    return torch.tensor(seed, device=device), torch.as_tensor(sample, device=device)


def ranks(mask: Bool[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """The how-manieth valid token of its sample each one is."""
    return mask.long().cumsum(-1) - 1


def _scrambled(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift repeats the sign."""
    return (state >> places) & ((1 << (64 - places)) - 1)
