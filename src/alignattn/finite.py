"""NaN and infinity in queries and keys: found, and the layer named, without waiting for the device at every step."""

from collections import deque

import torch
from torch import Tensor

from alignattn.devices import Arriving
from alignattn.errors import NonFiniteError


class FiniteCheck:
    """On a CPU the answer is there at once; an accelerator's is copied over and looked at when it has arrived."""

    def __init__(self) -> None:
        self._pending: deque[tuple[list[str], Arriving]] = deque()

    @torch.no_grad()
    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Look at queries and keys [l, b, h, tokens, d] of these layers, where masks [l, b, tokens] are True."""
        self.submit(names, finite_layers(query, key, query_mask, key_mask))

    def submit(self, names: list[str], finite: Tensor) -> None:
        """`finite` [l] tells for each of these layers whether all its queries and keys are finite."""
        if not finite.is_cuda:
            _raise_for(names, finite)
            return
        self._pending.append((names, Arriving(finite)))

    def look(self, *, but: int = 0) -> None:
        """Raise for what has arrived since, `but` for so many of the last: each takes its time to be asked."""
        while len(self._pending) > but and self._pending[0][1].are_here():
            names, finite = self._pending.popleft()
            _raise_for(names, finite.values())


def finite_layers(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Of queries and keys [l, b, h, tokens, d], where masks [l, b, tokens] are True: [l]."""
    return are_finite(largest_of(query, key, query_mask, key_mask))


def largest_of(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Of each layer's, a number [l] that is not finite where one of theirs is not."""
    return _largest(query, query_mask) + _largest(key, key_mask)


def are_finite(numbers: Tensor) -> Tensor:
    """Infinity minus itself is NaN, and so is NaN minus itself."""
    return numbers - numbers == 0


def whole_layers(witness: Tensor | None) -> Tensor:
    """Of numbers [l, ...] that are not finite where something of their layer is not: [l]."""
    assert witness is not None
    return are_finite(witness).flatten(1).all(1)


def _largest(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Of each layer, of what stands at valid tokens: NaN where there is one."""
    if not tokens.numel():
        return tokens.new_zeros(len(tokens))
    # Of each token first: masks are then of few numbers. Of the whole, half: the sum of two of the largest is none.
    if tokens.is_cuda:  # one launch
        largest: Tensor = torch.linalg.vector_norm(tokens, torch.inf, dim=-1)
    else:
        largest = tokens.abs().amax(-1)
    if mask is not None:
        largest = largest.masked_fill(~mask[:, :, None, :], 0.0)
    return largest.amax((1, 2, 3)) / 2


def _raise_for(names: list[str], finite: Tensor) -> None:
    if not bool(finite.all()):
        bad = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
        raise NonFiniteError(
            f"NaN or infinity in the queries or keys of {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''}. "
            "The model itself has diverged there, or overflowed in half precision: look at its loss, lower the "
            "learning rate, or use bf16."
        )
