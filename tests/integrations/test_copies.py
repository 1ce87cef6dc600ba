"""Copies and exports of an attached model are those of the plain one."""

import copy
import pickle

import torch

import alignattn


def test_copies_are_plain_models(bert, batch):
    plain = copy.deepcopy(bert)
    alignment = alignattn.align(bert, "gan")
    average = torch.optim.swa_utils.AveragedModel(bert)
    average.update_parameters(bert)
    for one in (copy.deepcopy(bert), pickle.loads(pickle.dumps(bert)), average):
        torch.manual_seed(1)
        loss = one(**batch).loss
        torch.manual_seed(1)
        assert torch.equal(loss, plain(**batch).loss)
    assert alignment.steps == 0  # and the alignment heard nothing of them
    other = alignattn.align(copy.deepcopy(bert), "mmd")  # a copy may be aligned for itself
    other.detach()


def test_an_attached_model_in_eval_exports(bert, batch):
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    bert.eval()
    expected = bert(**inputs).logits
    alignment = alignattn.align(bert, "ct")
    program = torch.export.export(bert, (), inputs)
    torch.testing.assert_close(program.module()(**inputs).logits, expected)
    names = {node.target for node in program.graph.nodes if node.op == "call_function"}
    alignment.detach()
    plain = torch.export.export(bert, (), inputs)
    assert {node.target for node in plain.graph.nodes if node.op == "call_function"} == names
