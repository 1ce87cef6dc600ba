"""Graph attention networks, one for each of several seeds, trained as one.

    z = W x,   query_i = a_dst * z_i,   key_j = a_src * z_j
    alpha_ij = softmax over j in N(i) of leaky_relu(sum(query_i) + sum(key_j)),   out_i = sum_j alpha_ij z_j + b

Velickovic et al. 2018, layer by layer what PyG's GATConv computes (a test holds it, and `plain` hands out the PyG
model). Weights have a leading axis of seeds, and nothing crosses it: first weights and dropout of each seed are drawn
from generators of its own, so that a seed comes to the same whichever others it is trained with.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignattn.errors import AlignmentError
from alignattn.models.sparsity import Pattern

Watch = Callable[[str, Tensor, Tensor], None]  # layer, queries and keys [seeds, heads, nodes, d]


class GraphInput:
    """Features and edges as the networks read them: features by their entries that are not zero, a self-loop a node."""

    def __init__(self, features: Float[Tensor, "n f"], edges: Int[Tensor, "2 e"]) -> None:
        nodes = len(features)
        row, column = features.nonzero(as_tuple=True)
        self.features = Pattern(row, column, (nodes, features.shape[1]))
        self.values = features[self.features.row, self.features.column]
        loops = torch.arange(nodes, device=edges.device)
        source, target = edges[:, edges[0] != edges[1]]
        self.edges = Pattern(torch.cat([target, loops]), torch.cat([source, loops]), (nodes, nodes))
        self.nodes = nodes


class Chance:
    """Dropout, each seed's from a generator of its own."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def dropped(self, values: Float[Tensor, "s *rest"], share: float) -> Float[Tensor, "s *rest"]:
        """The values, some of them zero and the others larger for it."""
        kept = torch.empty_like(values, memory_format=torch.contiguous_format)
        for own, generator in zip(kept, self.generators, strict=True):
            own.bernoulli_(1 - share, generator=generator)
        return values * kept.div_(1 - share)


class GATLayer(nn.Module):
    """One layer of graph attention for each seed."""

    def __init__(
        self, inputs: int, heads: int, width: int, *, concat: bool, generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()
        seeds, self.heads, self.width, self.concat = len(generators), heads, width, concat
        shapes = {"weight": (inputs, heads * width), "source": (heads, width), "target": (heads, width)}
        for name, shape in shapes.items():
            bound = math.sqrt(6 / sum(shape))  # Glorot
            drawn = [torch.empty(shape).uniform_(-bound, bound, generator=g) for g in generators]
            self.register_parameter(name, nn.Parameter(torch.stack(drawn)))
        self.bias = nn.Parameter(torch.zeros(seeds, heads * width if concat else width))

    weight: nn.Parameter  # [s, inputs, h d]
    source: nn.Parameter  # [s, h, d]: what makes a node's key
    target: nn.Parameter  # and its query

    def forward(
        self,
        projected: Float[Tensor, "s n hd"],
        edges: Pattern,
        drop: Callable[[Tensor], Tensor],
        drop_values: Callable[[Tensor], Tensor],
    ) -> tuple[Float[Tensor, "s n out"], Float[Tensor, "s h n d"], Float[Tensor, "s h n d"]]:
        """What comes out, with the queries and keys that decided it. `drop` acts on the coefficients,
        `drop_values` on what they gather.
        """
        seeds, nodes, _ = projected.shape
        z = projected.view(seeds, nodes, self.heads, self.width).transpose(1, 2)  # (s, h, n, d)
        query, key = z * self.target[:, :, None], z * self.source[:, :, None]
        alpha = drop(attention_along(edges, query, key))
        values = drop_values(z).reshape(-1, nodes, self.width)
        out = edges.product(alpha.flatten(0, 1), values)  # (s h, n, d)
        out = out.view(seeds, self.heads, nodes, self.width)
        out = out.transpose(1, 2).flatten(2) if self.concat else out.mean(1)
        return out + self.bias[:, None], query, key


class GATs(nn.Module):
    """A GAT of two layers for each seed: `heads` of `width` and ELU, then the classes.

    `dropout` acts on the inputs of both layers and on attention coefficients. `value_dropout` acts on the projected
    features that attention gathers, not on queries and keys: GAT's published code has it, its text and PyG do not.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        seeds: Sequence[int],
        heads: int = 8,
        width: int = 8,
        output_heads: int = 1,
        dropout: float = 0.6,
        value_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.seeds, self.dropout, self.value_dropout = tuple(seeds), dropout, value_dropout
        drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.first = GATLayer(features, heads, width, concat=True, generators=drawn)
        self.second = GATLayer(heads * width, output_heads, classes, concat=False, generators=drawn)
        self._chance: Chance | None = None

    def forward(self, graph: GraphInput, watch: Watch | None = None) -> Float[Tensor, "s n classes"]:
        """Logits of every node; `watch` is shown queries and keys of each layer."""
        hidden = self._dropped(self.embeddings(graph, watch))
        logits, query, key = self.second(hidden @ self.second.weight, graph.edges, self._dropped, self._values_dropped)
        if watch is not None:
            watch("second", query, key)
        return torch.as_tensor(logits)

    def embeddings(self, graph: GraphInput, watch: Watch | None = None) -> Float[Tensor, "s n hd"]:
        """What the first layer makes of every node, behind its ELU."""
        values = self._dropped(graph.values.expand(len(self.seeds), -1))
        projected = graph.features.product(values, self.first.weight)
        hidden, query, key = self.first(projected, graph.edges, self._dropped, self._values_dropped)
        if watch is not None:
            watch("first", query, key)
        return F.elu(hidden)

    def attention(self, graph: GraphInput) -> dict[str, Float[Tensor, "s h e"]]:
        """The coefficients of each layer along `graph.edges`, of which row attends to column; before any dropout."""
        found: dict[str, Tensor] = {}

        def watch(layer: str, query: Tensor, key: Tensor) -> None:
            found[layer] = attention_along(graph.edges, query, key)

        self(graph, watch)
        return found

    def _dropped(self, values: Tensor) -> Tensor:
        return self._without(values, self.dropout)

    def _values_dropped(self, values: Tensor) -> Tensor:
        return self._without(values, self.value_dropout)

    def _without(self, values: Tensor, share: float) -> Tensor:
        if not self.training or share == 0:
            return values
        if self._chance is None:
            self._chance = Chance(self.seeds, values.device)
        return self._chance.dropped(values, share)

    def keep_only(self, places: Sequence[int]) -> None:
        """Only the networks at these places stay; parameters are the same objects, with fewer rows."""
        self.seeds = tuple(self.seeds[place] for place in places)
        for parameter in self.parameters():
            parameter.data = parameter.data[list(places)]
        if self._chance is not None:
            self._chance.generators = [self._chance.generators[place] for place in places]

    def only(self, place: int) -> "GATs":
        """The network of one seed, by its place among them: a copy."""
        first, second = self.first, self.second
        one = GATs(
            first.weight.shape[1],
            second.width,
            seeds=self.seeds[place : place + 1],
            heads=first.heads,
            width=first.width,
            output_heads=second.heads,
            dropout=self.dropout,
            value_dropout=self.value_dropout,
        )
        one.load_state_dict({name: value[place : place + 1] for name, value in self.state_dict().items()})
        return one.to(first.weight.device).train(self.training)

    @torch.no_grad()
    def plain(self, place: int = 0) -> nn.Module:
        """The network of one seed as a model of PyG's GATConv, called with features and edges."""
        model = GAT(
            self.first.weight.shape[1],
            self.second.width,
            heads=self.first.heads,
            width=self.first.width,
            output_heads=self.second.heads,
            dropout=self.dropout,
        )
        for ours, theirs in ((self.first, model.first), (self.second, model.second)):
            theirs.lin.weight.copy_(ours.weight[place].mT)
            theirs.att_src.copy_(ours.source[place][None])
            theirs.att_dst.copy_(ours.target[place][None])
            theirs.bias.copy_(ours.bias[place])
        return model.to(self.first.weight.device).train(self.training)


class GAT(nn.Module):
    """One such network, of PyG's own layers: to be aligned, diagnosed and drawn as any other model."""

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        heads: int = 8,
        width: int = 8,
        output_heads: int = 1,
        dropout: float = 0.6,
    ) -> None:
        super().__init__()
        try:
            from torch_geometric.nn import GATConv
        except ImportError as error:
            raise AlignmentError(
                "A GAT of PyG's layers needs torch-geometric: pip install 'alignattn[graph]'"
            ) from error
        self.dropout = dropout
        self.first = GATConv(features, width, heads, dropout=dropout)
        self.second = GATConv(heads * width, classes, output_heads, concat=False, dropout=dropout)

    def forward(self, features: Float[Tensor, "n f"], edges: Int[Tensor, "2 e"]) -> Float[Tensor, "n classes"]:
        hidden = F.dropout(self.embeddings(features, edges), self.dropout, self.training)
        logits: Tensor = self.second(hidden, edges)
        return logits

    def embeddings(self, features: Float[Tensor, "n f"], edges: Int[Tensor, "2 e"]) -> Float[Tensor, "n hd"]:
        """What the first layer makes of every node, behind its ELU."""
        return F.elu(self.first(F.dropout(features, self.dropout, self.training), edges))


def attention_along(
    edges: Pattern, query: Float[Tensor, "s h n d"], key: Float[Tensor, "s h n d"]
) -> Float[Tensor, "s h e"]:
    """Of every edge, the coefficient by which the node of its row gathers that of its column."""
    row, column = (place.expand(*query.shape[:2], -1) for place in (edges.row, edges.column))
    logits = F.leaky_relu(query.sum(-1).gather(-1, row) + key.sum(-1).gather(-1, column), 0.2)
    return _softmax(logits, row, query.shape[2])


def _softmax(logits: Tensor, row: Tensor, nodes: int) -> Tensor:
    """Over the neighbours of each node, itself among them."""
    shape = (*logits.shape[:-1], nodes)
    most = logits.new_full(shape, -math.inf).scatter_reduce(-1, row, logits.detach(), "amax")
    powers = (logits - most.gather(-1, row)).exp()
    return powers / logits.new_zeros(shape).scatter_add(-1, row, powers).gather(-1, row)
