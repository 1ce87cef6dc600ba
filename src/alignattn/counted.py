"""What each problem of a stack counts: in the total, and in the gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Counted:
    """Numbers [l, b, h] of calls, samples and heads, filled in on the device when they are asked for."""

    shares: tuple[float, ...]  # [l]: what each call counts, by the mean of its samples, and each head
    shape: tuple[int, int, int]
    device: torch.device
    sample_weights: list[Tensor] | None = None  # l of [b]: not by the mean of samples, but with these
    acting: Tensor | None = None  # [l, 1, h]: by how much each head acts; None: all do
    scale: float = 1.0  # of the gradient

    def in_total(self) -> Tensor:
        """In the value."""
        samples = self.shape[1]
        if self.sample_weights is None:  # not copied there, which makes a device wait
            alike = self.shares[:1] if len(set(self.shares)) == 1 else self.shares
            filled = [torch.full((1, 1, 1), share / samples, device=self.device) for share in alike]
        else:
            weighed = zip(self.sample_weights, self.shares, strict=True)
            filled = [(weights * share)[None, :, None] for weights, share in weighed]
        return (filled[0] if len(filled) == 1 else torch.cat(filled)).expand(self.shape)

    def in_gradient(self) -> Tensor:
        """In the gradient, of networks too: heads that have met teach them nothing, and still count in the value."""
        total = self.in_total()
        return (total if self.acting is None else total * self.acting) * self.scale

    def is_known_as(self, other: "Counted") -> bool:
        """Whether the numbers are those of the other, told without looking at them."""
        given = self.sample_weights is None and other.sample_weights is None
        return given and self.acting is other.acting and (self.shares, self.scale) == (other.shares, other.scale)
