"""Sparse matrices that share one pattern, in one product.

    out[c] = A(values[c]) · dense[c],   c = 1 .. copies

Copies stand on the diagonal of one large matrix, so a sparse product of torch's serves them all: on an accelerator the
seeds and heads of a graph network take one launch, and nothing is added in an order that changes from run to run.
"""

import functools
import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Pattern:
    """Where a matrix [rows, columns] may differ from zero: `entries` in the order of their rows."""

    def __init__(self, row: Int[Tensor, " entries"], column: Int[Tensor, " entries"], size: tuple[int, int]) -> None:
        order = torch.argsort(row * size[1] + column)
        self.row, self.column, self.size = row[order], column[order], size
        self.order = order  # of the entries as they were given
        self._turned = torch.argsort(self.column * size[0] + self.row)  # the same entries, by columns
        self._copies: dict[int, tuple[Tensor, ...]] = {}

    def __len__(self) -> int:
        return len(self.row)

    def product(
        self, values: Float[Tensor, "copies entries"], dense: Float[Tensor, "copies columns d"]
    ) -> Float[Tensor, "copies rows d"]:
        """Each copy's matrix times its dense one, differentiable in both."""
        out: Tensor = _Product.apply(self, values, dense)
        return out

    def forward(self, values: Tensor, dense: Tensor) -> Tensor:
        """The product itself."""
        starts, columns, _, _ = self._of(len(values))
        return _times(starts, columns, values, dense, self.size)

    def transposed(self, values: Tensor, dense: Tensor) -> Tensor:
        """The product with the transposed matrices."""
        _, _, starts, columns = self._of(len(values))
        return _times(starts, columns, values[:, self._turned], dense, (self.size[1], self.size[0]))

    def _of(self, copies: int) -> tuple[Tensor, ...]:
        """Row starts and columns of the large matrix and of its transpose; kept."""
        if copies not in self._copies:
            rows, columns = self.size
            turned = self._turned
            self._copies[copies] = (
                _starts(self.row, rows, copies),
                _repeated(self.column, columns, copies),
                _starts(self.column[turned], columns, copies),
                _repeated(self.row[turned], rows, copies),
            )
        return self._copies[copies]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Pattern, values: Tensor, dense: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values, dense)
        return pattern.forward(values, dense)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        pattern: Pattern = ctx.pattern
        values, dense = ctx.saved_tensors
        of_out = gradients[0].contiguous()
        of_values = of_dense = None
        if ctx.needs_input_grad[1]:
            of_values = (of_out[:, pattern.row] * dense[:, pattern.column]).sum(-1)
        if ctx.needs_input_grad[2]:
            of_dense = pattern.transposed(values, of_out)
        return None, of_values, of_dense


def _times(starts: Tensor, columns: Tensor, values: Tensor, dense: Tensor, size: tuple[int, int]) -> Tensor:
    copies = len(values)
    _accept_beta()
    matrix = torch.sparse_csr_tensor(
        starts, columns, values.reshape(-1), size=(copies * size[0], copies * size[1]), check_invariants=False
    )
    return (matrix @ dense.reshape(copies * size[1], -1)).view(copies, size[0], -1)


def _starts(row: Tensor, rows: int, copies: int) -> Tensor:
    """Where each row of the large matrix begins, and the end; in 32 bits, which are twice as fast on a CPU."""
    counts = torch.bincount(row, minlength=rows).repeat(copies)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _repeated(column: Tensor, columns: int, copies: int) -> Tensor:
    shift = torch.arange(copies, device=column.device)[:, None] * columns
    return (column[None] + shift).reshape(-1).int()


@functools.cache
def _accept_beta() -> None:
    """Torch says once in a process that its CSR tensors are in beta: those who use a GAT need not mind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
