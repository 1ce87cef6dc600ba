"""Where attention happens in a model, and how one kind of place is reached."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from alignattn.capture.attending import Attending
from alignattn.capture.keybias import KeyBias, find_key_bias
from alignattn.capture.projection import ProjectionHooks, find_projections
from alignattn.capture.querykey import Projected, QueryKey
from alignattn.capture.standin import is_kept_for_backward
from alignattn.errors import UnsupportedModelError

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap


CROSS_NAMES = r"cross|encoder_attn|encdecattention|multihead_attn\b|src_attn"


@dataclass(frozen=True)
class Site:
    """One attention module of a model."""

    name: str
    module: nn.Module
    kind: str  # which socket reaches it
    heads: int | None  # None where only a call can tell
    width: int | None  # of a head

    @property
    def looks_cross(self) -> bool:
        """Whether its name says cross-attention. What counts is how it is called; this is for people to read."""
        return re.search(CROSS_NAMES, f"{self.name} {type(self.module).__name__}", re.IGNORECASE) is not None


class Socket:
    """Reaches the attention calls of one kind of module and hands them to the tap."""

    kind: ClassVar[str]
    can_stand_in: ClassVar[bool] = True
    is_blind_to_shifts: ClassVar[bool] = True  # logits are products of queries and keys and a bias, and nothing else

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        """The modules of the model that this socket can reach."""
        raise TypeError(f"{cls.__name__} must define find().")

    @classmethod
    def key_bias(cls, module: nn.Module) -> KeyBias | None:
        """The bias of its keys, where it has one that may be shifted at will."""
        return find_key_bias(module) if cls.is_blind_to_shifts else None

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        self.tap = tap
        self.sites = {site.module: site for site in sites}
        self.handles: list[RemovableHandle] = []

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the model is called with, in a forward pass that is to be recorded; then it opens."""

    def open(self) -> None:
        """A forward pass that is to be recorded begins."""

    def close(self) -> None:
        """It has ended."""

    def missed(self) -> list[Site]:
        """Modules that ran in the recorded forward pass without their queries and keys being seen."""
        return []

    def settle(self) -> None:
        """All that has to be found out by trying is known: do without hooks that were for that alone."""

    def idle(self) -> None:
        """A forward pass that is not to be recorded begins: leave no trace that could change it."""

    def remove(self) -> None:
        """Give the model back as it was."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class ProjectedSocket(Socket):
    """A socket that can also find the projections behind queries and keys, by the names they go by."""

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.projections: dict[nn.Module, ProjectionHooks] = {}
        if tap.projections:
            found = {site.module: self.projections_of(site) for site in sites}  # all or nothing
            for module, projections in found.items():
                self.projections[module] = ProjectionHooks(module, projections, partial(tap.records_from, module))
        self.children = {module: _children(module) for module in self.sites}
        self.cross: dict[nn.Module, bool] = {site.module: False for site in sites}
        self.silent: dict[nn.Module, None] = {}  # called in this forward pass, and its queries and keys not yet seen

    def projections_of(self, site: Site) -> list[tuple[str, nn.Module]]:
        """The children that make queries and keys."""
        return _projections_of(site)

    def open(self) -> None:
        self.silent.clear()
        for module, children in self.children.items():
            if _children(module) != children:  # an adapter may have taken a projection's place
                self.children[module] = _children(module)
                self.rehook(module)

    def rehook(self, module: nn.Module) -> None:
        """The children of an attention module are others than they were."""
        if module in self.projections:
            self.projections[module].remove()
            projections = self.projections_of(self.sites[module])
            self.projections[module] = ProjectionHooks(module, projections, partial(self.tap.records_from, module))

    def called(self, module: nn.Module) -> None:
        """A module runs that is to be recorded."""
        self.silent[module] = None

    def missed(self) -> list[Site]:
        return [self.sites[module] for module in self.silent]

    def close(self) -> None:
        for hooks in self.projections.values():
            hooks.forget()

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        key_mask: Tensor | None,
        *,
        cross: bool,
        segments: Tensor | None = None,
        attending: Attending | None = None,
        edges: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Hand one call over, unless it is cross-attention and that was not asked for."""
        self.silent.pop(module, None)
        projected = self.projected(module) if module in self.projections else ()
        if cross and not self.tap.cross:
            return
        n, m = query.shape[2], key.shape[2]
        query_mask = None
        if not cross and key_mask is not None and m >= n:
            # The queries are the last of the keys: a cache or prefix comes first.
            query_mask = key_mask if m == n else key_mask[:, m - n :]
        self.tap.take(
            QueryKey(
                query=query,
                key=key,
                query_mask=query_mask,
                key_mask=key_mask,
                segments=None if cross else segments,
                name=self.sites[module].name,
                projected=projected,
                query_output=self.tap.output(module, "query"),
                key_output=self.tap.output(module, "key"),
                attending=attending,
                edges=edges,
                kept=is_kept_for_backward(),
            )
        )

    def projected(self, module: nn.Module) -> tuple[Projected, ...]:
        """What its projections have put out in the call that is being recorded."""
        return tuple(self.projections[module].outputs)

    def stands_in_for(self, module: nn.Module) -> bool:
        """Whether this call is to be computed by the tap's own attention."""
        return self.tap.attend is not None and (self.tap.cross or not self.cross[module])

    def remove(self) -> None:
        super().remove()
        for hooks in self.projections.values():
            hooks.remove()


def _children(module: nn.Module) -> tuple[nn.Module | None, ...]:
    """As they are registered: asked in every pass, and `children()` takes its time."""
    return tuple(module._modules.values())


def _projections_of(site: Site) -> list[tuple[str, nn.Module]]:
    found = find_projections(site.module)
    if found is None:
        children = ", ".join(name for name, _ in site.module.named_children())
        raise UnsupportedModelError(
            f"generator='projections' needs the query and key projections of {site.name} "
            f"({type(site.module).__name__}), and none of its children ({children}) is known as one. Use "
            "generator='model'."
        )
    return found


OTHER_TOKENS = frozenset(
    [
        "key_value_states",
        "encoder_hidden_states",
        "cross_attention_states",
        "cross_states",
        "context",
        "memory",
        "kv",
        "x_kv",
        "encoder_output",
        "encoder_outputs",
        "image_hidden_states",
        "key",
        "keys",
        "key_tensor",
    ]
)


def attends_elsewhere(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module was called as cross-attention: told by the argument that brings the other tokens."""
    brought = [name for name in kwargs if name in OTHER_TOKENS and kwargs[name] is not None]
    if not brought and OTHER_TOKENS.isdisjoint(names[: len(args)]):
        return False  # as nearly always, and asked of every layer
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    own = next((value for value in given.values() if isinstance(value, Tensor)), None)
    others = (value for name, value in given.items() if name in OTHER_TOKENS)
    return any(isinstance(value, Tensor) and value is not own for value in others)


def first_integer(module: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these attributes, of the module or its config, that is a whole number."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nheads", "heads", "num_query_heads", "n_local_heads")
WIDTH = ("attention_head_size", "head_dim", "head_size", "d_kv", "key_value_proj_dim", "attention_head_dim", "dim_head")
