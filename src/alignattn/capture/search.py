"""Which attention modules of a model can be reached, and which of them are asked for."""

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn

from alignattn.capture.graph import GraphSocket
from alignattn.capture.hooked import HookedSocket
from alignattn.capture.huggingface import HuggingFaceSocket
from alignattn.capture.multihead import MultiheadSocket
from alignattn.capture.sdpa import SdpaSocket
from alignattn.capture.site import Site, Socket
from alignattn.errors import ConfigError, UnsupportedModelError

SOCKETS: tuple[type[Socket], ...] = (HuggingFaceSocket, HookedSocket, MultiheadSocket, GraphSocket, SdpaSocket)

Layers = int | str | Sequence[int | str] | None


def find_sites(model: nn.Module) -> list[Site]:
    """Every attention module of the model that can be reached, in the order of its modules."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"A torch.nn.Module is needed, got {type(model).__name__}.")
    found: dict[nn.Module, Site] = {}
    for socket in SOCKETS:
        for site in socket.find(model):
            found.setdefault(site.module, site)
    order = {module: place for place, module in enumerate(model.modules())}
    sites = sorted(found.values(), key=lambda site: order[site.module])
    if not sites:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention that can be captured: no module of it uses the attention "
            "interface of transformers, nn.MultiheadAttention, scaled_dot_product_attention, or GATConv, GATv2Conv or "
            "TransformerConv of PyG. In an attention of your own, make alignment = alignattn.Alignment(...) and call "
            "alignment.record(query, key, query_mask, key_mask) where queries and keys are at hand."
        )
    return sites


def choose(sites: list[Site], layers: Layers, model: nn.Module) -> list[Site]:
    """The sites that `layers` names: by index, by name, or by a pattern such as `encoder.layer.[0-5].*`."""
    if layers is None:
        return sites
    names = [site.name for site in sites]
    chosen: set[int] = set()
    for wanted in [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else layers:
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            if not -len(sites) <= wanted < len(sites):
                raise ConfigError(
                    f"layers={wanted}: {type(model).__name__} has {len(sites)} attention modules, 0 to "
                    f"{len(sites) - 1}."
                )
            chosen.add(wanted % len(sites))
            continue
        if not isinstance(wanted, str):
            raise ConfigError(f"layers must be numbers, names or patterns, got {wanted!r}.")
        matches = [
            i
            for i, name in enumerate(names)
            if name == wanted or name.startswith(f"{wanted}.") or fnmatch.fnmatchcase(name, wanted)
        ]
        if not matches:
            raise ConfigError(f"layers={wanted!r} matches no attention module. They are: {', '.join(names)}.")
        chosen.update(matches)
    if not chosen:
        raise ConfigError(f"layers={layers!r} leaves nothing to align.")
    return [site for i, site in enumerate(sites) if i in chosen]
