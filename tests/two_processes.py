"""Run by test_adversary under torchrun: two processes train on halves of a batch, and each compares with the whole."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import alignattn
from alignattn.distances import Distances


def train(model: nn.Module, inner: nn.Module, alignment: alignattn.Alignment, part: slice) -> None:
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for step in range(4):
        batch = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(step))[part]
        loss = model(batch).square().mean() + alignment.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    ours = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    alone = copy.deepcopy(ours)
    for method, stream in (("gan", None), ("ct", None), ("ct", "layer")):
        alignment = alignattn.align(ours, method, weight=0.5, stream=stream)
        train(DistributedDataParallel(ours), ours, alignment, slice(2 * rank, 2 * rank + 2))
        if rank == 0:
            alignment.state_dict()  # one process may save alone
        alignment.adversary.step()
        mine = [p.detach() for p in (*ours.parameters(), *alignment.parameters())]
        for tensor in mine:
            both = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(both, tensor.contiguous())
            assert torch.equal(both[0], both[1])
        seen = alignment._strength.distances.state_dict()
        alignment.detach()
        reference = alignattn.align(alone, method, weight=0.5)
        all_reduce, dist.all_reduce = dist.all_reduce, lambda flat: flat.mul_(2)  # a process for itself
        train(alone, alone, reference, slice(None))
        reference.adversary.step()
        dist.all_reduce = all_reduce
        whole_seen = reference._strength.distances.state_dict()
        assert seen.keys() == whole_seen.keys() and len(seen) == 2
        for name, heads in seen.items():
            torch.testing.assert_close(heads, whole_seen[name], rtol=1e-4, atol=1e-5)
        reference.detach()
        whole = [p.detach() for p in (*alone.parameters(), *reference.parameters())]
        for one, other in zip(mine, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    one_sees_nothing(rank)
    print("equal", flush=True)
    dist.destroy_process_group()


def one_sees_nothing(rank: int) -> None:
    """A process without a batch learns from the other what that saw."""
    distances = Distances()
    for look in range(3):
        if look != 1 or rank == 0:
            query, key = torch.randn(2, 1, 4, 3, 7, 5, generator=torch.Generator().manual_seed(look + 10 * rank))
            distances.watch(["layer"], query, key + 1, None, None)
        told = distances.settle(torch.device("cpu"))
        assert (told is None) == (look == 1 and rank == 1)
        (mine,) = distances.state_dict().values()
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(both[0], both[1])


if __name__ == "__main__":
    main()
