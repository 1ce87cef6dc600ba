"""Memory for what is computed on the way, used again by whoever computes the same next.

A system hands out fresh memory page by page, when it is first written to: on a CPU that takes longer than most of what
is computed there. So the temporary tensors of a piece of a matching lie where those of the piece before lay. None is
used twice within a piece, and nothing that outlives one may lie there. Only pieces of bounded size do so (at_once.py):
so this is bounded too, however large the model.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

BYTES: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu"}  # whatever the default of the process is


class _Here(threading.local):
    """Of a thread: the backward of CPU tensors runs in the one that asks for it."""

    scratch: "Scratch | None" = None  # of the piece that is being matched, where it uses memory again


_here = _Here()


class Scratch:
    """What the pieces of one matcher work in, one after the other. Copies of it are empty."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # as they are asked for within a piece
        self._next: int | None = None  # which is to be handed out now; None: between two pieces
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, ()

    @contextmanager
    def piece(self, *, reuses: bool) -> Iterator[None]:
        """What lies in memory that is used again is gone when this ends. Who does not say so gets fresh memory."""
        before = _here.scratch
        free = reuses and self._next is None  # another thread may be within a piece
        if free:
            self._next = 0
        _here.scratch = self if free else None
        try:
            yield
        finally:
            _here.scratch = before
            if free:
                self._next = None

    def block(self, size: int) -> Tensor:
        """So many bytes at least."""
        assert self._next is not None
        at, self._next = self._next, self._next + 1
        if at == len(self._blocks):
            self._blocks.append(torch.empty(size, **BYTES))
        elif self._blocks[at].numel() < size:
            self._blocks[at] = torch.empty(size, **BYTES)
        return self._blocks[at]

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies here."""
        lies = tensor.untyped_storage().data_ptr()
        return any(block.data_ptr() == lies for block in self._blocks)

    def give_back(self) -> None:
        """All of it, until a piece asks for some."""
        if self._next is None:
            self._blocks = []


_all: WeakSet[Scratch] = WeakSet()


def give_back() -> None:
    """Whatever any matcher holds."""
    for scratch in list(_all):
        scratch.give_back()


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor where another is, of its kind or of this one, with anything in it."""
    dtype = like.dtype if dtype is None else dtype
    if _here.scratch is None or like.device.type != "cpu":
        return like.new_empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    block = _here.scratch.block(size)
    return block[:size].view(dtype).view(tuple(shape))


def outliving(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it lies in memory that is used again."""
    return tensor.clone() if _here.scratch is not None and _here.scratch.holds(tensor) else tensor
