"""Alignment's share of the gradient in graph attention, against gradients taken one by one; and what it is on Cora."""

import json
from pathlib import Path

import pytest
import torch
from tiny import seeded
from torch import Tensor, nn

import alignattn
from alignattn.capture import QueryKey, Tap

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'alignattn[graph]'")
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric")

ROOT = Path(__file__).parent.parent.parent
NODES, WIDTH, LABELLED = 30, 6, 4


class Net(nn.Module):
    def __init__(self, convolution: type[nn.Module]) -> None:
        super().__init__()
        self.attend = convolution(WIDTH, 4, heads=3)
        self.classify = nn.Linear(12, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.classify(self.attend(x, edge_index))


def of_task(model: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    """Few nodes have a label."""
    return nn.functional.cross_entropy(model(x, edges)[:LABELLED], torch.arange(LABELLED) % 2)


@pytest.mark.parametrize("method", ["mmd", "ot"])
@pytest.mark.parametrize("convolution", [GATConv, GATv2Conv, TransformerConv])
def test_the_share_in_the_logs_is_that_of_gradients_taken_apart(convolution, method):
    generator = torch.Generator().manual_seed(0)
    x, edges = torch.randn(NODES, WIDTH, generator=generator), torch.randint(NODES, (2, 120), generator=generator)
    options = {"recentre": False, "until_met": False}

    model = seeded(lambda: Net(convolution))
    found: list[QueryKey] = []
    tap = Tap(model, watch=found.append)
    loss = of_task(model, x, edges)
    tap.remove()
    task = torch.autograd.grad(loss, [found[0].query, found[0].key])
    sides = [side.detach().requires_grad_() for side in (found[0].query, found[0].key)]
    apart = alignattn.Alignment(method, 1.0, **options)
    apart.record(*sides)
    of_alignment = torch.autograd.grad(apart.loss(), sides)
    expected = 0.7 * torch.stack([g.norm() for g in of_alignment]).norm() / torch.stack([g.norm() for g in task]).norm()

    model = seeded(lambda: Net(convolution))
    alignment = alignattn.align(model, method, weight=0.7, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (of_task(model, x, edges) + alignment.loss()).backward()
    optimizer.step()
    assert alignment.meter.read()["alignment_share"] == pytest.approx(float(expected), rel=1e-3)


def test_what_the_guide_says_of_auto_on_cora_is_what_its_file_says():
    told = json.loads((ROOT / "results" / "shares" / "cora.json").read_text())
    page = " ".join((ROOT / "docs" / "guide" / "graphs.md").read_text().split())
    firsts = [looks[0]["share"] for looks in told["looks"]["preset"].values()]
    later = [look["share"] for looks in told["looks"]["preset"].values() for look in looks if look["epoch"] >= 50]
    assert f"{min(firsts):.0f} to {max(firsts):.0f} times the task's" in page
    assert f"{min(later):.3f} to {max(later):.2f} from epoch 50 on" in page
    assert all(looks[0]["share"] == looks[0]["weight"] == 0 for looks in told["looks"]["watching"].values())
    fair = {
        method: [told["target"] * look["weight"] / look["share"] for look in looks]
        for method, looks in told["looks"]["preset"].items()
    }
    rises = [max(weights) / weights[0] for method, weights in fair.items() if method != "ct"]
    assert f"by {min(rises):.0f} to {max(rises):.0f} times" in page
    assert told["target"] == 0.2
