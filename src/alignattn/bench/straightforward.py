"""Alignment as one would write it down first: a module a layer, and every matrix in memory. The thing to beat.

The same mathematics as `preset="stable"`, which a test holds; nothing of the package's own matching is used. Queries
and keys come from hooks on the projections of a BERT.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = {"gan": 64, "ct": 16}
FEATURES = 16  # of critic and navigator


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _reverse(tensor: Tensor) -> Tensor:
    reversed_: Tensor = _Reverse.apply(tensor)
    return reversed_


class Network(nn.Module):
    """Highway layer and perceptron, of one layer of the model."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def features(self, tokens: Tensor, *, fixed: bool = False) -> Tensor:
        def through(layer: nn.Linear, tokens: Tensor) -> Tensor:
            return F.linear(tokens, layer.weight.detach(), layer.bias.detach()) if fixed else layer(tokens)

        gate = torch.sigmoid(through(self.gate, tokens))
        tokens = gate * F.relu(through(self.transform, tokens)) + (1 - gate) * tokens
        return F.leaky_relu(through(self.first, tokens), 0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        answer: Tensor = self.second(self.features(tokens))
        return answer


class LayerLoss(nn.Module):
    """The loss of one layer's queries and keys [b, h, n, d], valid tokens [b, n]; one number a problem, [b, h]."""

    def __init__(self, method: str, width: int) -> None:
        super().__init__()
        self.method = method
        if method == "gan":
            self.discriminator = Network(width, HIDDEN["gan"], 1)
        if method == "ct":
            self.critic = Network(width, HIDDEN["ct"], FEATURES)
            self.navigator = nn.Sequential(nn.Linear(width, HIDDEN["ct"]), nn.ReLU(), nn.Linear(HIDDEN["ct"], FEATURES))

    def forward(self, query: Tensor, key: Tensor, valid: Tensor) -> Tensor:
        query, key, weight = query.float(), key.float(), valid[:, None].float()  # (b, 1, n)
        count = weight.sum(-1)
        mean = ((query + key) * weight[..., None]).sum(2, keepdim=True) / (2 * count[..., None, None])
        square = ((query - mean).square() + (key - mean).square()).mean(-1) * weight
        scale = torch.rsqrt(square.sum(-1) / (2 * count) + 1e-6)[..., None, None]
        query, key = (query - mean) * scale, (key - mean) * scale
        computed: Tensor = getattr(self, f"_{self.method}")(query, key, weight, count)
        return computed

    def _mmd(self, query: Tensor, key: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        pooled, both = torch.cat([query, key], 2), torch.cat([weight, weight], 2)
        squares = _squared_distances(pooled, pooled)
        pooled_count = 2 * count
        mean = (pooled * both[..., None]).sum(2, keepdim=True) / pooled_count[..., None, None]
        spread = ((pooled - mean).square().sum(-1) * both).sum(-1)
        bandwidth = (2 * spread / (pooled_count - 1)).detach()  # the mean of |x-y|² over distinct pairs
        kernel = torch.exp(-squares / bandwidth[..., None, None]) * (both[..., None] * both[..., None, :])
        n = query.shape[2]
        off = 1 - torch.eye(n, device=query.device)
        pairs = count * (count - 1)
        within = (kernel[..., :n, :n] * off).sum((2, 3)) + (kernel[..., n:, n:] * off).sum((2, 3))
        between = (kernel[..., :n, n:] * off).sum((2, 3))
        return (within - 2 * between) / pairs

    def _ot(self, query: Tensor, key: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        log_mass = torch.log(weight / count[..., None]).expand(query.shape[:3])

        def regularised(x: Tensor, y: Tensor) -> Tensor:
            cost = _squared_distances(x, y) / (2 * x.shape[-1])
            with torch.no_grad():
                g = log_mass
                for _ in range(3):
                    f = log_mass - torch.logsumexp(g[..., None, :] - cost, -1)
                    g = log_mass - torch.logsumexp(f[..., :, None] - cost, -2)
                log_plan = f[..., :, None] + g[..., None, :] - cost
                plan = log_plan.exp()
                entropy = (plan * log_plan.masked_fill(plan == 0, 0.0)).sum((2, 3))
            return (plan * cost).sum((2, 3)) + entropy

        return regularised(query, key) - (regularised(query, query) + regularised(key, key)) / 2

    def _ct(self, query: Tensor, key: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        q, k = (F.normalize(_reverse(self.critic(_reverse(t))), dim=-1) for t in (query, key))
        cost = 1 - q @ k.mT
        scores = self.navigator(query) @ self.navigator(key).mT
        absent = (weight == 0)[:, :, None, :]  # (b, 1, 1, n)
        to_keys = scores.masked_fill(absent, -torch.inf).softmax(-1)
        to_queries = scores.masked_fill(absent.mT, -torch.inf).softmax(-2)
        forth = ((to_keys * cost).sum(-1) * weight).sum(-1) / count
        back = ((to_queries * cost).sum(-2) * weight).sum(-1) / count
        return torch.add(forth, back) / 2

    def _gan(self, query: Tensor, key: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        of_query, of_key = (_reverse(self.discriminator(t.detach()))[..., 0] for t in (query, key))
        value = ((F.logsigmoid(of_query) + F.logsigmoid(-of_key)) * weight).sum(-1) / count
        features = [self.discriminator.features(t, fixed=True) for t in (query, key)]
        centre = sum((f * weight[..., None]).sum(2, keepdim=True) for f in features) / (2 * count[..., None, None])
        x, y = ((f - centre) * weight[..., None] for f in features)
        off = 1 - torch.eye(x.shape[2], device=x.device)
        pairs = count * (count - 1)
        gap = torch.zeros_like(value)
        for a, b, factor in ((x, x, 1), (y, y, 1), (x, y, -2)):
            gap = gap + factor * ((a @ b.mT) * off).sum((2, 3))
        variance = (x.square().sum((2, 3)) + y.square().sum((2, 3))) / (2 * count)
        return gap / pairs / variance + (value - value.detach())


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * x @ y.mT).clamp_min(0.0)


def attach(model: nn.Module, method: str, weight: float, mask: Tensor) -> Callable[[], Tensor]:
    """Hook a BERT. Returns what steps the networks and gives the term of the forward pass that was just made."""
    attentions = [m for m in model.modules() if hasattr(m, "query") and hasattr(m, "key")]
    config: Any = model.config
    width = config.hidden_size // config.num_attention_heads
    device = mask.device
    losses = [LayerLoss(method, width).to(device) for _ in attentions]
    parameters = [p for loss in losses for p in loss.parameters()]
    adversary = torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.99)) if parameters else None
    caught: dict[tuple[int, str], Tensor] = {}
    for place, attention in enumerate(attentions):
        for side in ("query", "key"):

            def keep(_: nn.Module, __: object, output: Tensor, place: int = place, side: str = side) -> None:
                caught[place, side] = output.unflatten(-1, (-1, width)).transpose(1, 2)  # (b, h, n, d)

            getattr(attention, side).register_forward_hook(keep)
    valid = mask.bool()

    def term() -> Tensor:
        if adversary is not None:
            adversary.step()
            adversary.zero_grad()
        parts = [loss(caught[i, "query"], caught[i, "key"], valid).mean() for i, loss in enumerate(losses)]
        caught.clear()
        return weight * torch.stack(parts).mean()

    return term
