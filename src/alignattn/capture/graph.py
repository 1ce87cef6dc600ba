"""Attention over the edges of a graph: GATConv, GATv2Conv and TransformerConv of PyG.

    TransformerConv  logit(i, j) = query_i · (key_j + edge) / √d        query = W_q x_i,      key = W_k x_j
    GATv2Conv        logit(i, j) = a · LeakyReLU(query_i + key_j + edge)  query = W_r x_i,      key = W_l x_j
    GATConv          logit(i, j) = LeakyReLU(Σ query_i + Σ key_j + edge)  query = a_dst ∘ W x_i,  key = a_src ∘ W x_j

Node i attends to j along an edge from j to i. Queries and keys are taken where they are made, and the convolution goes
on from what was taken: so the task's gradient comes by there as well, and the two can be compared. Projections put
them out, or, in GATConv, a product with one of its vectors, which a function mode sees.

A convolution is never told which graph of a batch a node is in. The model is: its argument `batch`, or that of the
Data it is given. All graphs are one row then, packed, and each is a problem of its own; without, all nodes are one
graph. Edges go along in the record, after self-loops were added, for those who match neighbours alone.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alignattn.capture.attending import AlongEdges
from alignattn.capture.hook import Hook, in_backward
from alignattn.capture.keybias import KeyBias
from alignattn.capture.querykey import Projected
from alignattn.capture.site import ProjectedSocket, Site
from alignattn.errors import CaptureError, UnsupportedModelError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from alignattn.capture.tap import Tap

# Where each is defined, and which of its children make queries and which keys.
CONVOLUTIONS = {
    "GATConv": ("gat_conv", {"lin": "both", "lin_src": "key", "lin_dst": "query"}),
    "GATv2Conv": ("gatv2_conv", {"lin_l": "key", "lin_r": "query"}),
    "TransformerConv": ("transformer_conv", {"lin_query": "query", "lin_key": "key"}),
}


class GraphSocket(ProjectedSocket):
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
        self.running: list[_Call] = []
        self.graphs: Tensor | None = None  # [nodes]: which graph of the batch each is in
        self.names = _names_of_arguments(tap.model)
        self.watched: dict[nn.Module, list[RemovableHandle]] = {}
        for module in self.sites:
            self._watch(module)

    # --- what is hooked ---------------------------------------------------------------------------------------------

    def _watch(self, module: nn.Module) -> None:
        for handle in self.watched.pop(module, ()):
            handle.remove()
        conv: Any = module
        handles = [
            conv.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            conv.register_forward_hook(Hook(self._after), always_call=True),
            conv.register_propagate_forward_hook(Hook(self._propagated)),
        ]
        if convolution(module) != "GATConv":
            # Behind the hooks that make twins of what a projection puts out: what is taken comes from there.
            handles += [
                linear.register_forward_hook(Hook(self._projected(module, side)))
                for linear, side in _makers(module).items()
            ]
        self.watched[module] = handles

    def rehook(self, module: nn.Module) -> None:
        super().rehook(module)
        self._watch(module)

    def remove(self) -> None:
        super().remove()
        for handles in self.watched.values():
            for handle in handles:
                handle.remove()
        self.watched.clear()

    def projections_of(self, site: Site) -> list[tuple[str, nn.Module]]:
        return [("lin", linear) for linear in _makers(site.module)]

    def projected(self, module: nn.Module) -> tuple[Projected, ...]:
        """GATConv's vectors are part of its projections, being parameters they are their own twins."""
        own = (getattr(module, name, None) for name in ("att_src", "att_dst"))
        vectors = [one for one in own if isinstance(one, nn.Parameter) and one.requires_grad]
        return (*super().projected(module), *(Projected(one, one) for one in vectors))

    # --- a forward pass ---------------------------------------------------------------------------------------------

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.graphs = _graphs_of(dict(zip(self.names, args, strict=False)) | kwargs, args)

    def close(self) -> None:
        super().close()
        while self.running:
            self.running.pop().__exit__(None, None, None)
        self.graphs = None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if module.training:
                refuse_compiled_code()
            return
        recorded = self.tap.records_from(module)
        # A checkpointed layer must save the same tensors when it is computed again.
        again = in_backward() and module.training and torch.is_grad_enabled() and not self.tap.keeps_nothing
        if recorded or again:
            if recorded:
                self.called(module)
            self.cross[module] = _is_between_nodes_of_two_kinds(kwargs["x"] if "x" in kwargs else args[0])
            kind = _Products if convolution(module) == "GATConv" else _Call
            self.running.append(kind(module, recorded))
            self.running[-1].__enter__()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running and self.running[-1].module is module:
            self.running.pop().__exit__(None, None, None)

    def _call_of(self, module: nn.Module) -> "_Call | None":
        return self.running[-1] if self.running and self.running[-1].module is module else None

    def _projected(self, attention: nn.Module, side: str) -> Callable[..., Tensor | None]:
        def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            call = self._call_of(attention)
            if call is None:
                return None
            return call.take(output.unflatten(-1, (call.module.heads, -1)), side).flatten(1)

        return after

    def _propagated(self, module: nn.Module, inputs: tuple[Any, Any, dict[str, Any]], _output: Tensor) -> None:
        call = self._call_of(module)
        if call is None or not call.recorded:
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
        segments = None if cross and not self.tap.cross else self._segments(module, query.shape[2], key.shape[2])
        self.record(module, query, key, None, cross=cross, segments=segments, attending=attending, edges=edges)

    def _segments(self, module: nn.Module, queries: int, keys: int) -> Tensor | None:
        """Which graph each node is in, [1, nodes]; None: all are in one."""
        if self.graphs is None:
            return None
        if not queries == keys == len(self.graphs):
            raise CaptureError(
                f"{self.sites[module].name} ran on {keys} nodes and {queries} that attend to them, and the model's "
                f"batch is of {len(self.graphs)}: it cannot be told which graph each is in, and nodes of different "
                "graphs are never matched. Leave this convolution out with layers=."
            )
        return self.graphs[None]


class _Call:
    """One call of one convolution: its queries and keys so far."""

    def __init__(self, module: nn.Module, recorded: bool) -> None:
        self.module: Any = module
        self.recorded = recorded
        self.taken: dict[str, Tensor] = {}  # [1, h, nodes, d]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, tokens: Tensor, side: str) -> Tensor:
        """What was taken, [nodes, h, d] as it came. A projection of both sides makes keys, and then other queries."""
        heads = tokens.transpose(0, 1)[None]  # (1, h, nodes, d)
        if side != "query":
            self.taken.setdefault("key", heads)
        if side != "key":
            self.taken["query"] = heads
        return heads.squeeze(0).transpose(0, 1)  # views: gradients are added up as they were

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Queries and keys."""
        if len(self.taken) < 2:
            raise UnsupportedModelError(
                f"{name} was given no nodes that attend, (x, None), and so has no queries. Give it both kinds of "
                "nodes, or leave it out with layers=."
            )
        return self.taken["query"], self.taken["key"]

    def edges(self, edge_index: Any, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """Places of queries and of keys, one an edge."""
        key_at = 0 if self.module.flow == "source_to_target" else 1
        if type(edge_index) is Tensor and edge_index.layout == torch.strided:
            return edge_index[1 - key_at], edge_index[key_at]
        device = self.taken["key"].device
        counts = {key_at: keys, 1 - key_at: queries}
        places = [self.module._lift(torch.arange(counts[at], device=device), edge_index, at) for at in (0, 1)]
        return places[1 - key_at], places[key_at]


class _Products(_Call, TorchFunctionMode):
    """A call of GATConv, which multiplies its nodes by the vectors of keys and of queries."""

    def __init__(self, module: nn.Module, recorded: bool) -> None:
        TorchFunctionMode.__init__(self)
        _Call.__init__(self, module, recorded)

    def __enter__(self) -> Any:
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *of: Any) -> None:  # noqa: PYI036
        TorchFunctionMode.__exit__(self, *of)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if len(args) == 2 and getattr(func, "__name__", "") in ("mul", "__mul__"):
            for side, vector in (("key", self.module.att_src), ("query", self.module.att_dst)):
                if args[1] is vector:
                    return self.take(found, side)
        return found


def convolution(module: nn.Module) -> str | None:
    """Which of the three it is, or is derived from. PyG is not imported: a model that holds one has done so."""
    for name, (file, _) in CONVOLUTIONS.items():
        kind = getattr(sys.modules.get(f"torch_geometric.nn.conv.{file}"), name, None)
        if kind is not None and isinstance(module, kind):
            return name
    return None


def _makers(module: nn.Module) -> dict[nn.Module, str]:
    """The children that make queries and keys, and which of them; one that goes by two names makes both."""
    makers: dict[nn.Module, str] = {}
    for name, side in CONVOLUTIONS[str(convolution(module))][1].items():
        if isinstance(linear := getattr(module, name, None), nn.Module):
            makers[linear] = "both" if linear in makers else side
    return makers


def _is_between_nodes_of_two_kinds(nodes: Any) -> bool:
    """Whether those that attend are others. Samplers hand over nodes, and of them the first as those that attend."""
    if isinstance(nodes, Tensor) or nodes[1] is None:
        return False
    keys, queries = nodes
    return bool(keys.data_ptr() != queries.data_ptr() or keys.shape[1:] != queries.shape[1:])


# --- which graph a node is in ---------------------------------------------------------------------------------------


def _names_of_arguments(model: nn.Module) -> list[str]:
    own = getattr(model, "signature", None)  # PyG's Sequential is told its arguments by name
    if isinstance(parameters := getattr(own, "param_dict", None), Mapping):
        return list(parameters)
    return list(inspect.signature(model.forward).parameters)


def _graphs_of(given: dict[str, Any], args: tuple[Any, ...]) -> Tensor | None:
    """The `batch` of the model's arguments, or of the Data among them."""
    found = next(_batches({**given, **dict(enumerate(args))}), None)
    if isinstance(found, Mapping):  # of nodes of several kinds
        if any(int(batch.max()) > 0 for batch in found.values() if isinstance(batch, Tensor) and batch.numel()):
            raise UnsupportedModelError(
                "A batch of several graphs with several kinds of nodes: which of them a convolution runs on cannot be "
                "told, and nodes of different graphs are never matched. Give the model one such graph at a time."
            )
        return None
    return found if isinstance(found, Tensor) else None


def _batches(given: Mapping[Any, Any]) -> Iterator[Tensor | Mapping[str, Any]]:
    for name in ("batch", "batch_dict"):
        if isinstance(given.get(name), Tensor | Mapping):
            yield given[name]
    for value in given.values():
        if isinstance(value, Mapping) and isinstance(value.get("batch"), Tensor):
            yield value["batch"]
        elif any(kind.__module__.startswith("torch_geometric.data") for kind in type(value).__mro__):
            several = getattr(value, "batch_dict", None) if hasattr(value, "node_types") else None
            batch = several or getattr(value, "batch", None)
            if isinstance(batch, Tensor | Mapping):
                yield batch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiled_code() -> None:
    """Called, not traced: an error while tracing only leaves the caller uncompiled, and nobody is told."""
    raise UnsupportedModelError(
        "PyG calls none of the hooks of its convolutions in compiled code, so their queries and keys are not seen "
        "there. Leave out torch.compile while alignment is attached."
    )
