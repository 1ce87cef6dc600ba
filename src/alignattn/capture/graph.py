"""Attention over the edges of a graph: GATConv, GATv2Conv and TransformerConv of PyG.

    TransformerConv  logit(i, j) = query_i · (key_j + edge) / √d        query = W_q x_i,      key = W_k x_j
    GATv2Conv        logit(i, j) = a · LeakyReLU(query_i + key_j + edge)  query = W_r x_i,      key = W_l x_j
    GATConv          logit(i, j) = LeakyReLU(Σ query_i + Σ key_j + edge)  query = a_dst ∘ W x_i,  key = a_src ∘ W x_j

Node i attends to j along an edge from j to i. Queries and keys are taken where they are made, and the convolution goes
on from what was taken: so the task's gradient comes by there as well, and the two can be compared (convolutions.py).

All graphs of a batch are one row, packed, and each is a problem of its own (graph_batches.py); without a batch all
nodes are one graph. Edges go along in the record, after self-loops were added, for those who match neighbours alone.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alignattn.capture.attending import AlongEdges
from alignattn.capture.calls import CallSocket
from alignattn.capture.convolutions import Call, Products, convolution, makers
from alignattn.capture.graph_batches import SEVERAL_KINDS, Told, graphs_of, names_of_arguments
from alignattn.capture.hook import Hook
from alignattn.capture.keybias import KeyBias
from alignattn.capture.querykey import Projected
from alignattn.capture.site import Site
from alignattn.errors import CaptureError, UnsupportedModelError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from alignattn.capture.tap import Tap


class GraphSocket(CallSocket[Call]):
    """Takes what the projections of a convolution put out, and its edges when it propagates."""

    kind = "graph attention"
    can_stand_in = False

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        return [
            Site(name, module, cls.kind, int(module.heads), int(module.out_channels))
            for name, module in model.named_modules()
            if convolution(module) is not None
        ]

    @classmethod
    def key_bias(cls, module: nn.Module) -> KeyBias | None:
        """TransformerConv's alone: elsewhere a LeakyReLU stands between keys and softmax, and keys are values too."""
        linear = getattr(module, "lin_key", None)
        if convolution(module) != "TransformerConv" or not isinstance(getattr(linear, "bias", None), nn.Parameter):
            return None
        return KeyBias(linear, "bias", 0, module.heads * module.out_channels, None)  # type: ignore[arg-type, operator]

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.told = Told()  # which graph of the batch each node is in
        self.names = names_of_arguments(tap.model)
        for module in self.sites:
            self.watch(module)

    # --- what is hooked ---------------------------------------------------------------------------------------------

    def hooks(self, module: nn.Module) -> "list[RemovableHandle]":
        conv: Any = module
        handles = [
            conv.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            conv.register_forward_hook(Hook(self.end), always_call=True),
            conv.register_propagate_forward_hook(Hook(self._propagated)),
        ]
        if convolution(module) != "GATConv":
            # Behind the hooks that make twins of what a projection puts out: what is taken comes from there.
            handles += [
                linear.register_forward_hook(Hook(self._projected(module, side)))
                for linear, side in makers(module).items()
            ]
        return handles

    def projections_of(self, site: Site) -> list[tuple[str, nn.Module]]:
        return [("lin", linear) for linear in makers(site.module)]

    def projected(self, module: nn.Module) -> tuple[Projected, ...]:
        """GATConv's vectors are part of its projections, being parameters they are their own twins."""
        own = (getattr(module, name, None) for name in ("att_src", "att_dst"))
        vectors = [one for one in own if isinstance(one, nn.Parameter) and one.requires_grad]
        return (*super().projected(module), *(Projected(one, one) for one in vectors))

    # --- a forward pass ---------------------------------------------------------------------------------------------

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        said = self.tap.graphs
        self.told = graphs_of(self.names, args, kwargs) if said is None else Told(*said)

    def close(self) -> None:
        super().close()
        self.told = Told()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if module.training:
                refuse_compiled_code()
            return
        # Of a checkpointed layer that is computed again nothing is taken: views save no tensors that it could miss.
        if self.tap.records_from(module):
            self.cross[module] = _is_between_nodes_of_two_kinds(kwargs["x"] if "x" in kwargs else args[0])
            kind = Products if convolution(module) == "GATConv" else Call
            self.begin(kind(module))

    def _projected(self, attention: nn.Module, side: str) -> Callable[..., Tensor | None]:
        def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            call = self.running_call(attention)
            if call is None:
                return None
            return call.take(output.unflatten(-1, (call.module.heads, -1)), side).flatten(1)

        return after

    def _propagated(self, module: nn.Module, inputs: tuple[Any, Any, dict[str, Any]], _output: Tensor) -> None:
        call = self.running_call(module)
        if call is None:
            return
        query, key = call.pair(self.sites[module].name)
        if 0 in (query.shape[2], key.shape[2]):  # a kind of nodes that this batch has none of
            self.silent.pop(module, None)
            return
        edges = call.edges(inputs[0], query.shape[2], key.shape[2])
        attending = None
        if self.tap.attending:
            weights = inputs[2]["alpha"] if "alpha" in inputs[2] else call.module._alpha  # noqa: SIM401
            attending = AlongEdges(edges=edges, weights=weights.detach())
        cross = self.cross[module]
        left_out = cross and not self.tap.cross
        segments = None if left_out else self._segments(module, edges, query.shape[2], key.shape[2])
        self.record(module, query, key, None, cross=cross, segments=segments, attending=attending, edges=edges)

    def _segments(self, module: nn.Module, edges: tuple[Tensor, Tensor], queries: int, keys: int) -> Tensor | None:
        """Which graph each node is in, [1, nodes]; None: all are in one."""
        told = self.told
        if not self.cross[module]:  # those that attend are all nodes, or the first of them
            graphs = told.of(*edges, keys)
        elif told.graphs is None and (told.kinds or not told.named):
            if told.tells_two_kinds_apart(*edges, queries, keys):
                raise UnsupportedModelError(SEVERAL_KINDS)
            return None
        else:
            graphs = told.graphs if told.graphs is not None else next(iter(told.named.values()))
        if graphs is None:
            return None
        if self.cross[module] or not queries == keys == len(graphs):
            if not graphs.any():  # one graph, whatever is done to its nodes
                return None
            raise CaptureError(
                f"{self.sites[module].name} ran on {keys} nodes and {queries} that attend to them, and the model's "
                f"batch is of {len(graphs)}: it cannot be told which graph each is in, and nodes of different "
                "graphs are never matched. Leave this convolution out with layers=, or say which graphs there are: "
                "alignment.graphs(vector), or alignment.graphs(None) where all nodes are in one."
            )
        return graphs[None]


def _is_between_nodes_of_two_kinds(nodes: Any) -> bool:
    """Whether those that attend are others. Samplers hand over nodes, and of them the first as those that attend."""
    if isinstance(nodes, Tensor) or nodes[1] is None:
        return False
    keys, queries = nodes
    return bool(keys.data_ptr() != queries.data_ptr() or keys.shape[1:] != queries.shape[1:])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiled_code() -> None:
    """Called, not traced: an error while tracing only leaves the caller uncompiled, and nobody is told."""
    raise UnsupportedModelError(
        "PyG calls none of the hooks of its convolutions in compiled code, so their queries and keys are not seen "
        "there. Leave out torch.compile while alignment is attached."
    )
