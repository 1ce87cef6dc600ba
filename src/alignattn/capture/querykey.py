"""What an attention module does in one call, and the queries and keys that are left of it to be matched."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignattn.capture.attending import Attending
from alignattn.capture.standin import stand_in
from alignattn.errors import ShapeError

HIDDEN = -5000.0  # a bias or logit below hides a key: hosts add -10000, -1e9, the dtype's minimum or -inf


@dataclass(frozen=True)
class AttentionCall:
    """One call of one attention module: `softmax(query keyᵀ · scale + bias) value`, before anything is computed.

    Keys and values may have fewer heads than queries (grouped-query attention); masked pairs have a bias of -inf.
    """

    module: nn.Module
    query: Float[Tensor, "b h n d"]
    key: Float[Tensor, "b g m d"]
    value: Float[Tensor, "b g m v"]
    scale: float
    bias: Float[Tensor, "*bias"] | None  # broadcasts to [b, h, n, m]
    dropout: float
    proceed: Callable[[], Tensor]  # what the model would have done: output [b, h, n, v]

    def weights(self) -> Float[Tensor, "b h n m"]:
        """The attention weights of soft attention, no dropout; zeros where a query may see no key at all."""
        logits = self.query @ to_query_heads(self.key, self.query.shape[1]).mT * self.scale
        if self.bias is None:
            return logits.softmax(-1)
        blind = (self.bias == -math.inf).all(-1, keepdim=True)  # as scaled_dot_product_attention has it
        return (logits + self.bias.masked_fill(blind, 0.0)).softmax(-1).masked_fill(blind, 0.0)

    def attend(self, weights: Float[Tensor, "b h n m"]) -> Float[Tensor, "b h n v"]:
        """Values gathered by any weights."""
        return weights @ to_query_heads(self.value, self.query.shape[1])


@dataclass(frozen=True)
class Projected:
    """The output of a query or key projection, and a twin of it.

    A gradient given to the twin reaches the projection's parameters and stops there.
    """

    output: Tensor
    twin: Tensor


@dataclass(frozen=True)
class Source:
    """What copies of queries or keys were computed from: some rows of a weight, and the tokens it was applied to.

    The task's gradient meets them there and nowhere after, as its own queries and keys are others.
    """

    weight: Tensor  # [rows, e], a parameter
    start: int
    tokens: Tensor  # [b, n, e]

    def gradient(self, of_copies: Float[Tensor, "b h n d"]) -> Float[Tensor, "rows e"]:
        """The gradient of those rows, from that of the copies."""
        merged = of_copies[:, :, : self.tokens.shape[1]].transpose(1, 2).flatten(2)  # (b, n, rows): no extra tokens
        return merged.flatten(0, 1).float().mT @ self.tokens.flatten(0, 1).float()


@dataclass(eq=False)  # not frozen: every call of a model makes one, and that takes three times as long
class QueryKey:
    """The queries and keys of one attention call, keys repeated to the heads of the queries. Checked when made."""

    query: Tensor  # [b, h, n, d]
    key: Tensor  # [b, h, m, d]
    query_mask: Tensor | None = None  # [b, n], True = valid
    key_mask: Tensor | None = None  # [b, m]
    segments: Tensor | None = None  # [b, n]: which document of a packed row, or graph, a token belongs to
    sample_weight: Tensor | None = None  # [b]: the loss is the sum over samples with these, not their mean
    name: str = ""
    call: int = 0  # how often this module had been called before in the same forward pass
    projected: tuple[Projected, ...] = ()
    query_output: Tensor | None = None  # what the projections put out, where something about them is free
    key_output: Tensor | None = None
    query_source: Source | None = None  # where queries and keys are copies
    key_source: Source | None = None
    attending: Attending | None = None  # of the call as it was recorded, packed or not, where the tap asks for it
    # In a graph: [e] places of queries, among all b·n, and [e] of the keys, among all b·m, that they attend to.
    edges: tuple[Tensor, Tensor] | None = None
    kept: bool = True  # for the backward by whoever made them, as they are; else we should not keep them either

    def __post_init__(self) -> None:
        if not self._is_as_usual():
            self._check()

    def _is_as_usual(self) -> bool:
        """Whether nothing is wrong and nothing to be done: told at once, as every call of a model is asked."""
        query, key = self.query.shape, self.key.shape
        samples, heads, count, width = query if len(query) == 4 else (0, 0, 0, 0)
        if len(key) != 4 or (samples, heads, width) != (key[0], key[1], key[3]):
            return False
        if 0 in query or key[2] == 0 or not (self.query.is_floating_point() and self.key.is_floating_point()):
            return False
        for mask, tokens in ((self.query_mask, count), (self.key_mask, key[2])):
            if mask is not None and (mask.dtype != torch.bool or mask.shape != (samples, tokens)):
                return False
        return True

    def _check(self) -> None:
        for side, tensor, mask in (("query", self.query, self.query_mask), ("key", self.key, self.key_mask)):
            if tensor.ndim != 4 or 0 in tensor.shape:
                raise ShapeError(
                    f"{self._who}: {side} must be [b, h, tokens, d], none of them zero, got {_of(tensor)}."
                )
            if not tensor.is_floating_point():
                raise ShapeError(f"{self._who}: {side} must be floating point, got {tensor.dtype}.")
            if mask is None:
                continue
            if mask.dtype != torch.bool:
                raise ShapeError(f"{self._who}: {side}_mask must be boolean, True = valid, got {mask.dtype}.")
            if mask.shape != (tensor.shape[0], tensor.shape[2]):
                expected = (tensor.shape[0], tensor.shape[2])
                raise ShapeError(f"{self._who}: {side}_mask must be [b, tokens] = {expected}, got {_of(mask)}.")
        query, key = self.query.shape, self.key.shape
        if query[0] != key[0] or query[3] != key[3] or query[1] % key[1]:
            raise ShapeError(
                f"{self._who}: query {_of(self.query)} and key {_of(self.key)} must agree in samples and width, and "
                "the heads of the queries be a multiple of those of the keys."
            )
        if key[1] != query[1]:
            self.key = to_query_heads(self.key, query[1])

    @property
    def _who(self) -> str:
        return self.name or "record"

    @property
    def samples(self) -> int:
        """As many as were recorded, packed or not."""
        return len(self.query)

    def watch_backward(self, mark: Callable[[Tensor], None]) -> bool:
        """Call `mark` when a gradient comes to the queries; False where none will."""
        if self.query.requires_grad:
            self.query.register_hook(mark)
        return self.query.requires_grad

    def let_go(self) -> None:
        """Of the numbers: they are matched, and who hands them gradients needs none."""
        self.query, self.key = stand_in(self.query), stand_in(self.key)
        self.query_output = self.key_output = self.query_source = self.key_source = None
        self.projected = ()

    def unpacked(self) -> "QueryKey":
        """One row a document, where several were packed into one row."""
        if self.segments is None:
            return self
        valid = self.query_mask if self.query_mask is not None else torch.ones_like(self.segments, dtype=torch.bool)
        samples = len(valid)
        label = self.segments + (self.segments.max() + 1) * torch.arange(samples, device=valid.device)[:, None]
        _, document = torch.unique(label[valid], return_inverse=True)  # (tokens,)
        if document.numel() == 0:
            return replace(self, segments=None)
        documents = int(document.max()) + 1
        if documents == samples and self.query_mask is None:
            return replace(self, segments=None)  # nothing was packed
        lengths = torch.bincount(document, minlength=documents)
        longest = int(lengths.max())
        start = lengths.cumsum(0) - lengths
        order = torch.argsort(document, stable=True)
        place = torch.arange(len(document), device=valid.device) - start[document[order]]
        row, column = valid.nonzero(as_tuple=True)
        mask = valid.new_zeros(documents, longest)
        mask[document[order], place] = True

        edges = None
        if self.edges is not None:
            moved = torch.zeros(valid.numel(), dtype=torch.long, device=valid.device)
            moved[valid.flatten().nonzero()[order, 0]] = document[order] * longest + place
            edges = moved[self.edges[0]], moved[self.edges[1]]

        def gather(tokens: Tensor) -> Tensor:
            packed = tokens.new_zeros(documents, longest, tokens.shape[1], tokens.shape[3])
            chosen = tokens.transpose(1, 2)[row[order], column[order]]  # (tokens, h, d)
            return packed.index_put((document[order], place), chosen).transpose(1, 2)

        weight = None
        if self.sample_weight is not None:  # a row's, shared out by tokens
            of_row = self.sample_weight / valid.sum(1).clamp_min(1)
            weight = of_row.new_zeros(documents).index_add(0, document, of_row[row])
        return replace(
            self,
            query=gather(self.query),
            key=gather(self.key),
            query_mask=mask,
            key_mask=mask,
            segments=None,
            sample_weight=weight,
            query_output=None,
            key_output=None,
            edges=edges,
        )


def to_query_heads(tokens: Float[Tensor, "b g m d"], heads: int) -> Float[Tensor, "b h m d"]:
    """Each key head repeated for the query heads that share it."""
    groups = tokens.shape[1]
    return tokens if groups == heads else tokens.repeat_interleave(heads // groups, dim=1)


def valid_keys(mask: Tensor | None, samples: int, keys: int) -> Bool[Tensor, "b m"] | None:
    """Which keys an attention mask leaves to any query; None when it hides none.

    Boolean masks are True where attention may go; float ones are added to the logits.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask > HIDDEN if mask.is_floating_point() else mask != 0
    while mask.ndim < 4:
        mask = mask[None]
    allowed = mask[..., :keys].flatten(1, 2).any(1)  # (b or 1, m)
    return allowed.expand(samples, keys)


def as_bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of any kind as a bias to be added to logits."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)


def causal_bias(query: Tensor, key: Tensor) -> Tensor:
    """-inf above the diagonal, aligned at the first query and key as scaled_dot_product_attention does."""
    hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -math.inf)


def _of(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
