"""Tiny models for the tests here, and what one can see of them from outside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from alignattn.capture import QueryKey, Tap

VOCABULARY = 40
SAMPLES, LENGTH = 3, 7
LENGTHS = (7, 4, 5)


def seeded(build: Callable[[], nn.Module], spread: float = 0.4) -> nn.Module:
    """The model with weights large enough that attention is far from uniform; the global random state stays."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=spread)
            else:
                nn.init.normal_(parameter, mean=1.0 if parameter.mean() > 0.5 else 0.0, std=0.1)
    return model


def _with(config: type, model: type, **values: Any) -> Callable[..., nn.Module]:
    def build(implementation: str = "sdpa", **more: Any) -> nn.Module:
        made = config(**(values | {"vocab_size": VOCABULARY} | more))
        made._attn_implementation = implementation
        return seeded(lambda: model(made))

    return build


def _encoder(**more: Any) -> dict[str, Any]:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    return shape | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | more


def _decoder(**more: Any) -> dict[str, Any]:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return shape | {"intermediate_size": 24, "max_position_embeddings": 32, "use_cache": False} | more


_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "use_cache": False}
_BART = {
    **{f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))},
    "d_model": 16, "dropout": 0.0, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}

bert = _with(transformers.BertConfig, transformers.BertModel, **_encoder())
bert_classifier = _with(transformers.BertConfig, transformers.BertForSequenceClassification, **_encoder())
gpt2 = _with(transformers.GPT2Config, transformers.GPT2Model, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **_GPT2)
llama = _with(transformers.LlamaConfig, transformers.LlamaModel, **_decoder())
qwen3 = _with(transformers.Qwen3Config, transformers.Qwen3Model, head_dim=4, **_decoder())
t5 = _with(transformers.T5Config, transformers.T5Model, **_T5)
bart = _with(transformers.BartConfig, transformers.BartModel, **_BART)
mpnet = _with(transformers.MPNetConfig, transformers.MPNetModel, **_encoder())
deberta = _with(transformers.DebertaV2Config, transformers.DebertaV2Model, relative_attention=False, **_encoder())


def padded_batch(side: str | None, *, decoder: bool = False) -> dict[str, Tensor]:
    """Token ids and, unless side is None, a mask of LENGTHS padded on that side."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    batch = {"input_ids": ids}
    if side is not None:
        batch["attention_mask"] = valid_tokens(side).long()
    if decoder:
        batch["decoder_input_ids"] = torch.randint(5, VOCABULARY, (SAMPLES, LENGTH - 1), generator=generator)
    return batch


def valid_tokens(side: str | None) -> Tensor:
    if side is None:
        return torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    right = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    return right if side == "right" else right.flip(1)


@dataclass
class Seen:
    """The inputs and output of one call of a module."""

    hidden: Tensor
    others: Tensor  # the tokens that keys are made of
    output: Tensor
    given: dict[str, Any] = field(default_factory=dict)


@contextmanager
def observed(model: nn.Module, names: list[str]) -> Iterator[dict[str, Seen]]:
    """What the named modules are called with and put out, by hooks that know nothing of taps."""
    seen: dict[str, Seen] = {}

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            others = kwargs.get("key_value_states")
            first = output[0] if isinstance(output, tuple) else output
            given = kwargs | {"args": args}
            seen[name] = Seen(hidden.detach(), hidden.detach() if others is None else others, first.detach(), given)

        return after

    handles = [model.get_submodule(n).register_forward_hook(hook(n), with_kwargs=True) for n in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def records_of(model: nn.Module, *args: Any, tap: dict[str, Any] | None = None, **batch: Any) -> list[QueryKey]:
    """What a tap that is there for this one forward pass records."""
    records: list[QueryKey] = []
    watching = Tap(model, watch=records.append, **(tap or {}))
    try:
        model(*args, **batch)
    finally:
        watching.remove()
    return records


def first_output(model: nn.Module, *args: Any, **batch: Any) -> Tensor:
    output = model(*args, **batch)
    return output if isinstance(output, Tensor) else output[0]


def traces(model: nn.Module) -> dict[str, Any]:
    """All that attaching to a model could leave behind on it or beside it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
             "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} hooks"] = {hook: list(getattr(module, hook)) for hook in hooks}
        found[f"{name} dict"] = sorted(vars(module))
        found[f"{name} forward"] = module.forward.__func__  # type: ignore[attr-defined]
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        found[f"{name} implementation"] = implementation
        namespace = module.forward.__func__.__globals__  # type: ignore[attr-defined]
        found[f"{name} interface"] = id(namespace.get("ALL_ATTENTION_FUNCTIONS"))
    found["global hooks"] = len(nn_module._global_forward_hooks), len(nn_module._global_forward_pre_hooks)
    found["function modes"] = list(torch.overrides._get_current_function_mode_stack())
    found["fast path"] = torch.backends.mha.get_fastpath_enabled()
    found["state"] = list(model.state_dict()), list(dict(model.named_parameters()))
    return found
