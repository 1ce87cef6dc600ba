"""The bias of a key projection: a shift of all keys, to which softmax attention is blind.

    softmax_j( q_i·(k_j + c) ) = softmax_j( q_i·k_j + q_i·c ) = softmax_j( q_i·k_j )

So it can be set at will, as long as keys go from their projection into the product as they are. Where a rotation or a
norm comes between, or the projection has no bias, nothing can be shifted for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignattn.capture.projection import NORM, side_of


@dataclass(frozen=True)
class KeyBias:
    """Where an attention module keeps the bias of its keys."""

    owner: nn.Module
    attribute: str
    start: int  # of the part that belongs to keys
    size: int
    projection: nn.Module | None  # whose output the keys must be; None: they are by construction

    @property
    def parameter(self) -> nn.Parameter:
        """Looked up when it is needed: sharding a model puts others in its place."""
        parameter: nn.Parameter = getattr(self.owner, self.attribute)
        return parameter

    @torch.no_grad()
    def shift(self, by: Tensor, *, frozen_too: bool = False) -> None:
        """Add `by`, as many numbers as the part has, to the bias; in training a frozen one stays."""
        parameter = self.parameter
        if parameter.requires_grad or frozen_too:
            behind = parameter.shape[0] - self.start - self.size
            parameter.add_(like(F.pad(by, (self.start, behind)), parameter))


@torch.no_grad()
def shift_each(biases: Sequence[KeyBias], by: Tensor) -> None:
    """Shift each by its own row of `by`, [l, size]; in one call where all are alike and lie where `by` does."""
    parameters = [bias.parameter for bias in biases]
    dtype = parameters[0].dtype
    plain = all(p.dtype == dtype and p.device == by.device and not hasattr(p, "placements") for p in parameters)
    if not plain or len({id(parameter) for parameter in parameters}) < len(parameters):
        for bias, row in zip(biases, by.unbind(), strict=True):
            bias.shift(row)
        return
    pairs = [
        (parameter if bias.size == len(parameter) else parameter[bias.start : bias.start + bias.size], row)
        for bias, parameter, row in zip(biases, parameters, by.to(dtype).unbind(), strict=True)
        if parameter.requires_grad
    ]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def find_key_bias(module: nn.Module) -> KeyBias | None:
    """The key bias of an attention module, where it has one and it is known by its name."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_bias is None or module.bias_k is not None or module.add_zero_attn:
            return None  # keys that are added behind the projection are not shifted with the others
        return KeyBias(module, "in_proj_bias", module.embed_dim, module.embed_dim, None)
    children = list(module.named_children())
    keys = [child for name, child in children if side_of(name) == "key"]
    if len(keys) != 1 or any(NORM.match(name) for name, _ in children):
        return None
    bias = getattr(keys[0], "bias", None)
    return KeyBias(keys[0], "bias", 0, len(bias), keys[0]) if isinstance(bias, nn.Parameter) else None


def are_projected(tokens: Tensor, output: Tensor | None) -> Tensor:
    """Whether keys or queries [b, h, m, d] are just what their projection put out, [b, m, groups·d]; on the device."""
    samples, heads, length, width = tokens.shape
    if output is None or output.ndim != 3 or output.shape[:2] != (samples, length) or output.shape[2] % width:
        return torch.zeros((), dtype=torch.bool, device=tokens.device)
    split = output.unflatten(-1, (-1, width)).transpose(1, 2)  # (b, groups, m, d)
    groups = split.shape[1]
    if heads % groups:
        return torch.zeros((), dtype=torch.bool, device=tokens.device)
    same: Tensor = (tokens.unflatten(1, (groups, -1)) == split[:, :, None]).all()
    return same


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """Values in the parameter's dtype, sharded as it is."""
    values = values.to(device=parameter.device, dtype=parameter.dtype)
    if hasattr(parameter, "placements"):  # as FSDP2 makes of parameters
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return values
