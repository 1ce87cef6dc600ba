"""Rows that hold several documents, told by positions that start again: one problem a document."""

import pytest
import tiny
import torch
import transformers
from tiny import records_of
from torch import Tensor

import alignattn

DOCUMENTS = [[7, 8, 9], [10, 11, 12, 13], [14, 15], [16, 17, 18, 19, 20, 21], [22, 23, 24]]
ROWS = [DOCUMENTS[:3], DOCUMENTS[3:]]  # nine tokens each


IDS = torch.tensor([[token for document in row for token in document] for row in ROWS])


def packed() -> dict[str, Tensor]:
    positions = torch.tensor([[i for document in row for i in range(len(document))] for row in ROWS])
    return {"input_ids": IDS, "position_ids": positions}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_records_of_packed_rows_are_those_of_the_documents(implementation):
    model = tiny.llama(implementation).train()
    together = [record.unpacked() for record in records_of(model, **packed())]
    assert len(together) == 2
    for place, document in enumerate(DOCUMENTS):
        alone = records_of(model, torch.tensor([document]))
        for record, expected in zip(together, alone, strict=True):
            valid = record.query_mask[place]
            assert valid.sum() == len(document) and torch.equal(valid, record.key_mask[place])
            torch.testing.assert_close(record.query[place][:, valid], expected.query[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(record.key[place][:, valid], expected.key[0], rtol=1e-4, atol=1e-5)


def test_a_row_that_is_attended_to_as_a_whole_is_one_document():
    """With a cache transformers does not look at positions, and eager attention has a mask all the same."""
    model = tiny.llama("eager").train()
    for record in records_of(model, **packed(), use_cache=True):
        assert record.unpacked().query.shape[:3:2] == (2, 9)
    for record in records_of(model, **packed(), use_cache=False):
        assert record.unpacked().query.shape[:3:2] == (5, 6)


def test_positions_beside_a_mask_of_padding_tell_of_no_documents():
    """One row of it serves all queries: they attend to the whole row."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)
    inputs = {"bbox": torch.zeros(2, 8, 4, dtype=torch.long), "position_ids": positions}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for implementation in ("eager", "sdpa"):
        config = transformers.LayoutLMConfig(vocab_size=60, attn_implementation=implementation, **small)
        (record,) = records_of(transformers.LayoutLMModel(config).train(), IDS[:, :8], **inputs)
        assert record.segments is None and record.query.shape[0] == 2


@pytest.mark.parametrize("method", ["mmd", "ot", "ct", "gan"])
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_loss_of_packed_rows_is_the_mean_over_documents(method, generator):
    """In value and in gradient. The networks, where there are any, stay as they are."""
    model = tiny.llama().train()
    alignment = alignattn.align(model, method, generator=generator, adversary_optimizer=None)

    def loss_and_gradients(*batches: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        total = torch.tensor(0.0)
        for batch in batches:
            model(**batch)
            loss = alignment.loss() / len(batches)
            loss.backward()
            total += loss.detach()
        return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, gradients = loss_and_gradients(*({"input_ids": torch.tensor([d])} for d in DOCUMENTS))
    value, of_packed = loss_and_gradients(packed())
    alignment.detach()
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(of_packed, gradients, rtol=1e-3, atol=1e-5)
    assert any(gradient.abs().max() > 1e-4 for gradient in gradients.values())


def test_positions_that_go_on_mean_one_document_a_row():
    model = tiny.llama().train()
    plain = records_of(model, IDS)
    numbered = [record.unpacked() for record in records_of(model, IDS, position_ids=torch.arange(9).expand(2, 9))]
    for record, expected in zip(numbered, plain, strict=True):
        assert torch.equal(record.query, expected.query)
        assert record.query_mask is None or record.query_mask.all()


def test_mask_that_is_given_is_what_counts():
    """transformers reads documents off the positions only when it is given no mask."""
    model = tiny.llama().train()
    batch = packed()
    for record in records_of(model, **batch, attention_mask=torch.ones_like(batch["input_ids"])):
        assert record.segments is None
