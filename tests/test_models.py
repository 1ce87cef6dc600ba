"""A dozen families of the registry, and the table in docs/models.md that tools/model_table.py makes of all of them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import alignattn
from alignattn.errors import CaptureError, UnsupportedModelError

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]

from model_facts import captured, evaluate, look_at, same, tensors_of  # noqa: E402
from model_table import Row, problems_of, read_table, row_of  # noqa: E402
from zoo import BY_NAME, FAMILIES, GROUPED, SMALL, VOCABULARY, padded_mask, text  # noqa: E402

DOZEN = (
    "BERT",
    "ALBERT",
    "DistilBERT",
    "ModernBERT",
    "DeBERTa",
    "DeBERTa-v2",
    "MPNet",
    "GPT-2",
    "GPT-J",
    "BLOOM",
    "Llama",
    "DeepSeek-V3.2",
    "T5",
    "BART",
    "FSMT",
    "EncoderDecoderModel",
    "ViT",
    "Swin v2",
    "Whisper",
    "SigLIP",
    "MarkupLM",
    "FNet",
    "Longformer",
    "Mamba",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on two, and much slower where other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def table() -> dict[str, Row]:
    return read_table()


@pytest.mark.parametrize("name", DOZEN)
def test_family_does_what_the_table_says_and_nothing_is_silently_wrong(name: str, table: dict[str, Row]) -> None:
    looks = [look_at(BY_NAME[name], implementation) for implementation in BY_NAME[name].implementations]
    assert problems_of(looks) == []
    assert row_of(looks) == table[name]


def test_table_lists_the_registry_and_at_least_forty_families(table: dict[str, Row]) -> None:
    assert list(table) == [family.name for family in FAMILIES]
    assert len(table) >= 40
    assert {name for name, row in table.items() if not row.attached} == {f.name for f in FAMILIES if f.refused}
    assert all(row.note for row in table.values() if not row.attached)


def test_albert_of_twelve_layers_gives_twelve_records_of_one_module() -> None:
    config = transformers.AlbertConfig(**SMALL | {"num_hidden_layers": 12, "embedding_size": 16})
    records = captured(transformers.AlbertModel(config), text())
    assert len(records) == 12
    assert len({record.name for record in records}) == 1
    assert [record.call for record in records] == list(range(12))
    assert len({record.query.detach().sum().item() for record in records}) == 12


def test_grouped_keys_of_llama_are_repeated_for_their_query_heads_after_rotary() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = BY_NAME["Llama"].build()
    attention = model.model.layers[0].self_attn
    tokens: list[torch.Tensor] = []
    attention.register_forward_pre_hook(
        lambda m, args, kwargs: tokens.append(kwargs["hidden_states"]), with_kwargs=True
    )
    record = captured(model, text())[0]
    query = attention.q_proj(tokens[0]).unflatten(-1, (4, 8)).transpose(1, 2)
    key = attention.k_proj(tokens[0]).unflatten(-1, (2, 8)).transpose(1, 2)
    positions = torch.arange(tokens[0].shape[1])[None]
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(tokens[0], positions))
    assert GROUPED["num_key_value_heads"] == 2
    torch.testing.assert_close(record.query, query)
    torch.testing.assert_close(record.key, key.repeat_interleave(2, dim=1))


def test_encoder_decoder_model_is_captured_whole() -> None:
    family = BY_NAME["EncoderDecoderModel"]
    records = captured(family.build(), family.inputs())
    assert [record.name for record in records] == [
        f"{part}.layer.{layer}.attention.self"
        for part in ("encoder.encoder", "decoder.bert.encoder")
        for layer in (0, 1)
    ]
    with_cross = captured(family.build(), family.inputs(), cross=True)
    assert sum("crossattention" in record.name for record in with_cross) == 2


@pytest.mark.parametrize(("name", "first"), [("MVP", "model.encoder.layers.0.self_attn"), ("XLM", "attentions.0")])
def test_queries_that_are_scaled_before_the_product_are_captured_as_projected(name: str, first: str) -> None:
    family = BY_NAME[name]
    model = family.build()
    attention, outputs = model.get_submodule(first), []
    projection = attention.q_proj if name == "MVP" else attention.q_lin
    projection.register_forward_hook(lambda module, args, output: outputs.append(output))
    record = captured(model, family.inputs())[0]
    assert record.name == first
    assert torch.equal(record.query, outputs[0].unflatten(-1, (4, 8)).transpose(1, 2))


def test_models_that_share_a_file_are_told_apart_and_come_off_in_any_order() -> None:
    family = BY_NAME["BERT"]
    one, two, plain = family.build(), family.build(), family.build()
    expected = evaluate(plain, text())
    first, second = alignattn.align(one, "mmd", add_to_outputs=False), alignattn.align(two, "mmd", add_to_outputs=False)
    first.detach()
    one.train()(**text())
    plain.train()(**text())
    with pytest.raises(alignattn.AlignmentError):
        second.loss()
    two.train()(**text())
    assert second.loss() > 0
    second.detach()
    from transformers.models.bert import modeling_bert

    assert modeling_bert.ALL_ATTENTION_FUNCTIONS is transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert all(same(expected, evaluate(model, text())) for model in (one, two, plain))


def test_the_implementation_may_change_while_attached() -> None:
    model = BY_NAME["BERT"].build("sdpa")
    alignment = alignattn.align(model, "mmd", add_to_outputs=False)
    model.set_attn_implementation("eager")
    assert len(model(**text(), output_attentions=True).attentions) == 2
    model.train()(**text())
    assert alignment.loss() > 0
    alignment.detach()
    assert model.config._attn_implementation == "eager"


def test_attention_that_ran_unseen_is_refused_by_name() -> None:
    """GPT-2 goes round the attention interface with this option."""
    family = BY_NAME["GPT-2"]
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "reorder_and_upcast_attn": True}
    config = transformers.GPT2Config(**options, attn_implementation="eager")
    model = replace(family, config=lambda: config).build("eager")
    alignattn.align(model, "mmd")
    with pytest.raises(UnsupportedModelError, match=r"transformer\.h\.0\.attn .* ran, and no product"):
        model.train()(**text())
    model.eval()(**text())


def test_layers_leaves_out_what_cannot_be_captured() -> None:
    family = BY_NAME["PEGASUS-X"]
    model = family.build()
    with pytest.raises(UnsupportedModelError, match="layers="):
        captured(model, family.inputs())
    alignment = alignattn.align(model, "mmd", layers="model.decoder", add_to_outputs=False)
    model.train()(**family.inputs())
    assert alignment.loss() > 0


def test_masks_of_minus_ten_thousand_hide_keys() -> None:
    """As some families pass them through the interface, where others pass the dtype's minimum."""
    from alignattn.capture.querykey import valid_keys

    bias = (1.0 - padded_mask().float()) * -10000.0
    assert torch.equal(valid_keys(bias[:, None, None], 3, 8), padded_mask().bool())


def test_a_model_compiled_before_it_is_attached_is_captured() -> None:
    model = BY_NAME["DistilBERT"].build().train()
    compiled = torch.compile(model, backend="eager")
    compiled(**text())
    alignment = alignattn.align(model, "mmd", add_to_outputs=False)
    compiled(**text())
    assert len(alignment._passes.waiting[-1].records) == 2


def test_projections_of_a_compiled_model_are_refused_not_forgotten() -> None:
    """Here the keys go through a cache and lose the way to their projections; the queries do not."""
    family = BY_NAME["T5"]
    model = family.build().train()
    alignment = alignattn.align(model, "mmd", 1.0, add_to_outputs=False, generator="projections")
    torch.compile(model, backend="aot_eager")(**family.inputs())
    with pytest.raises(CaptureError, match=r"torch\.compile"):
        alignment.loss()


@pytest.mark.parametrize("name", ["DeBERTa-v2", "BLOOM"])
def test_written_out_attention_under_checkpointing_gives_the_same_gradients(name: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = BY_NAME[name].build().train()
        for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        alignment = alignattn.align(model, "mmd", 1.0, add_to_outputs=False)
        logits = next(tensors_of(model(**text())))
        (alignment.loss() + logits.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        alignment.detach()
    for plain, other in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, other)
