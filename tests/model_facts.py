"""What is true of alignattn on one tiny model: looked at from outside, by means of its own."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import alignattn
from alignattn.capture import QueryKey, Tap
from alignattn.errors import AlignmentError, UnsupportedModelError
from zoo import Family, Inputs


@dataclass
class Facts:
    """Of one family with one attention implementation. `problems` is empty unless something is silently wrong."""

    family: Family
    implementation: str
    refusal: str | None = None  # why, if it was refused
    refused_when: str = "attached"
    kinds: tuple[str, ...] = ()
    modules: int = 0
    heads: tuple[int, ...] = ()
    calls: int = 0  # self-attention calls recorded in one training forward
    cross_calls: int = 0
    attention_calls: int = 0  # softmaxes over keys and calls of SDPA in it, by our own count
    multiplied: int = 0  # records whose queries and keys are, but for a factor, what was multiplied
    projections: str | None = None  # why generator="projections" is refused
    problems: list[str] = field(default_factory=list)

    @property
    def attached(self) -> bool:
        return self.refusal is None


def look_at(family: Family, implementation: str | None = None) -> Facts:
    """Build, attach, train one step, detach, and compare with the plain model."""
    implementation = implementation or family.implementations[0]
    facts = Facts(family, implementation)
    model, inputs = family.build(implementation), family.inputs()
    plain = evaluate(model, inputs)
    names = config_names(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    try:
        _attached(facts, model, inputs, plain)
    except UnsupportedModelError as error:
        facts.refusal = str(error)
    if list(model.state_dict()) != list(state) or [id(parameter) for parameter in model.parameters()] != parameters:
        facts.problems.append("the parameters or the state dict are not the plain model's")
    model.load_state_dict(state)  # batch norms have moved
    if not same(plain, evaluate(model, inputs)):
        facts.problems.append("eval outputs differ after detach")
    if config_names(model) != names:
        facts.problems.append("attention implementations of the configs are not restored")
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        facts.problems.append("hooks are left")
    if facts.attached:
        facts.projections = _why_no_projections(family, implementation, facts)
    return facts


def _attached(facts: Facts, model: nn.Module, inputs: Inputs, plain: list[Tensor]) -> None:
    alignment = alignattn.align(model, "mmd", 1.0, add_to_outputs=False)
    facts.refused_when = "first trained"  # if at all
    try:
        if not same(plain, evaluate(model, inputs)):
            facts.problems.append("eval outputs differ while attached")
        sites = alignment._tap.sites  # type: ignore[union-attr]
        facts.kinds = tuple(sorted({site.kind for site in sites}))
        trained = list(tensors_of(run_training(model.train(), inputs)))
        parts = _gradients(facts, alignment, model, sites)
    finally:
        model.eval()
        alignment.detach()
    facts.calls = parts
    if not same(trained, list(tensors_of(run_training(model.train(), inputs)))):
        facts.problems.append("outputs in training mode differ while attached")
    _records_are_right(facts, model, inputs, sites)


def _gradients(facts: Facts, alignment: alignattn.Alignment, model: nn.Module, sites: list[Any]) -> int:
    loss = alignment.loss()
    if not loss.isfinite():
        facts.problems.append(f"the loss is {loss.item()}")
    model.zero_grad()
    loss.backward()
    recorded = {name.split("#")[0] for name in alignment.parts}
    for site in sites:
        if site.name in recorded:
            makers = query_key_makers(site.module)
            if not makers:
                facts.problems.append(f"{site.name}: its query and key projections are not known to the test")
            for name, parameter in makers:
                if parameter.grad is None or not parameter.grad.abs().sum() > 0:
                    facts.problems.append(f"{site.name}: no gradient reaches {name}")
    if all(p.grad is None or not p.grad.abs().sum() > 0 for p in model.parameters()):
        facts.problems.append("no gradient reaches the model")
    return len(alignment.parts)


def _records_are_right(facts: Facts, model: nn.Module, inputs: Inputs, sites: list[Any]) -> None:
    heads = {site.name: site.heads for site in sites}
    with SeenProducts() as products:
        records = captured(model, inputs, cross=True)
    own = captured(model, inputs)
    if len(own) != facts.calls:
        facts.problems.append(f"{facts.calls} parts of the loss and {len(own)} records")
    facts.cross_calls = len(records) - len(own)
    facts.attention_calls = products.softmaxes
    facts.modules = len({record.name for record in own})
    facts.heads = tuple(sorted({record.query.shape[1] for record in own}))
    facts.multiplied = sum(products.contain(record) for record in records)
    validity = facts.family.validity(model, inputs)
    for record in own:
        if heads[record.name] not in (None, record.query.shape[1]):
            facts.problems.append(
                f"{record.name}: {record.query.shape[1]} heads, and the site says {heads[record.name]}"
            )
        for side in ("query", "key"):
            tokens, mask = getattr(record, side), getattr(record, f"{side}_mask")
            expected = None if validity is None else validity.get(tokens.shape[2])
            if validity is not None and not _same_mask(mask, expected):
                facts.problems.append(f"{record.name}: {side} mask {_written(mask)}, expected {_written(expected)}")
    if facts.calls != facts.family.calls:
        facts.problems.append(f"{facts.calls} self-attention calls, expected {facts.family.calls}")
    multihead = sum(site.kind == "nn.MultiheadAttention" for site in sites)  # calls nothing that we could count
    if facts.attention_calls + multihead != len(records) + facts.family.other_softmaxes:
        facts.problems.append(f"{facts.attention_calls} softmaxes, and {len(records)} records")
    if facts.multiplied + multihead != len(records):
        facts.problems.append(f"queries and keys of {facts.multiplied} of {len(records)} records were multiplied")
    if facts.cross_calls != facts.family.cross_calls:
        facts.problems.append(f"{facts.cross_calls} cross-attention calls, expected {facts.family.cross_calls}")


def _why_no_projections(family: Family, implementation: str, facts: Facts) -> str | None:
    model, inputs = family.build(implementation), family.inputs()
    try:
        alignment = alignattn.align(model, "mmd", 1.0, add_to_outputs=False, generator="projections")
    except AlignmentError as error:
        return str(error)
    try:
        run_training(model.train(), inputs)
    except AlignmentError as error:
        alignment.detach()
        return str(error)
    alignment.loss().backward()
    makers = [pair for s in alignment._tap.sites for pair in query_key_makers(s.module)]  # type: ignore[union-attr]
    reached = {id(p) for p in model.parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    makers_reached = [name for name, p in makers if id(p) in reached]
    if len(makers_reached) < len(_recorded_makers(alignment)):
        facts.problems.append("generator='projections': the gradient does not reach every projection")
    strangers = reached - {id(p) for s in alignment._tap.sites for p in s.module.parameters()}  # type: ignore[union-attr]
    if strangers:
        facts.problems.append("generator='projections': the gradient goes further than the attention modules")
    alignment.detach()
    return None


def _recorded_makers(alignment: alignattn.Alignment) -> list[Tensor]:
    recorded = {name.split("#")[0] for name in alignment.parts}
    sites = [s for s in alignment._tap.sites if s.name in recorded]  # type: ignore[union-attr]
    return [p for s in sites for _, p in query_key_makers(s.module)]


# --- means of looking ----------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)  # a few draw noise in eval mode too
    return list(tensors_of(model.eval()(**inputs)))


def run_training(model: nn.Module, inputs: Inputs) -> Any:
    torch.manual_seed(0)
    return model(**inputs)


def captured(model: nn.Module, inputs: Inputs, *, cross: bool = False) -> list[QueryKey]:
    """The records of one training forward."""
    records: list[QueryKey] = []
    tap = Tap(model, watch=records.append, cross=cross)
    model.train()
    try:
        run_training(model, inputs)
    finally:
        tap.remove()
        model.eval()
    return records


def tensors_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def config_names(model: nn.Module) -> list[Any]:
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [getattr(config, "_attn_implementation", None) for config in configs.values()]


def query_key_makers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of the projections that make queries and keys, by their names."""
    kinds = r"q|k|query|key|qkv|wqkv|qk|wq|wk|kv|c_attn|in|query_key_value|kv_a|kv_b|q_a|q_b|experts\.input"
    ends = r"(_?(proj|lin|linear|projection|proj_with_mqa))?"
    starts = r"(linear_|to_|project_|projection_)?"
    maker = re.compile(rf"(^|\.){starts}({kinds}){ends}\.(.*\.)?weight$", re.IGNORECASE)
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if maker.search(name) and not name.startswith("indexer.") and parameter.ndim > 1
    ]


class SeenProducts(TorchFunctionMode):
    """Counts softmaxes over keys and keeps the operands of all products: what attention multiplies is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.softmaxes = 0
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.softmaxes += 1
            query, key = (args[0], args[1]) if len(args) > 1 else (kwargs["query"], kwargs["key"])
            groups = query.shape[1] // key.shape[1] if query.ndim == 4 else 1
            self.pairs.append(
                (query.detach(), key.detach().repeat_interleave(groups, 1) if groups > 1 else key.detach())
            )
        elif name == "softmax" and args and args[0].ndim >= 3:
            self.softmaxes += 1
        elif name in ("matmul", "bmm", "__matmul__", "baddbmm", "einsum"):
            operands = args[1:3] if name in ("baddbmm", "einsum") else args[:2]
            if name == "einsum" and isinstance(operands[0], list | tuple):
                operands = operands[0]
            if name == "baddbmm":
                operands = (kwargs.get("batch1", args[1] if len(args) > 1 else None), kwargs.get("batch2", args[-1]))
            if len(operands) == 2 and all(isinstance(t, Tensor) and t.is_floating_point() for t in operands):
                left, right = operands
                self.pairs.append((left.detach(), right.detach() if name == "einsum" else right.detach().mT))
        return func(*args, **kwargs)

    def contain(self, record: QueryKey) -> bool:
        """Whether queries and keys of the record, times a positive factor, were multiplied with each other."""
        pairs = ((q, k.expand(-1, q.shape[1], -1, -1) if k.ndim == 4 and k.shape[1] == 1 else k) for q, k in self.pairs)
        return any(_parallel(record.query, left) and _parallel(record.key, right) for left, right in pairs)


def _parallel(tokens: Tensor, other: Tensor) -> bool:
    n, d = tokens.shape[2:]
    if other.numel() != tokens.numel() or other.shape[-2:] != (n, d):
        return False
    one, two = tokens.detach().reshape(-1).float(), other.reshape(-1).float()
    one, two = one / one.norm(), two / two.norm()
    return bool((one - two).norm() < 1e-4)


def _same_mask(mask: Tensor | None, expected: Tensor | None) -> bool:
    if mask is None:
        return expected is None or bool(expected.all())
    if expected is None:
        return bool(mask.all())
    return torch.equal(mask, expected.expand(mask.shape) if len(mask) % len(expected) == 0 else expected)


def _written(mask: Tensor | None) -> str:
    return "None" if mask is None else " ".join("".join(str(int(v)) for v in row) for row in mask[:4])
