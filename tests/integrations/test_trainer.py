"""Alignment under the Trainer: logs, checkpoints, and losses computed outside the model."""

import copy

import pytest
import tiny_training
import torch
from tiny_training import ONE_GRADIENT, make_classifier, sentences
from transformers import Trainer

import alignattn
from alignattn.errors import CaptureError, DataError, NothingCapturedError
from alignattn.integrations.trainer import AlignmentTrainer, AlignmentTrainerMixin


@pytest.fixture
def model():
    return make_classifier(dropout=0.1)


@pytest.fixture
def data():
    return sentences(16)


def arguments(folder, **changes):
    values = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 2}
    return tiny_training.arguments(folder, **(values | changes))


def state_of(model, alignment):
    networks = {f"networks.{k}": v for k, v in alignment.matcher.state_dict().items()}
    moments = alignment.state_dict()["adversary"].get("moments", {})
    adam = {f"adam.{i}.{k}": v for i, values in moments.items() for k, v in values.items()}
    return {**model.state_dict(), **networks, **adam, "steps": torch.tensor(alignment.steps)}


def test_the_term_the_task_and_every_layer_reach_the_logs_and_tensorboard(model, data, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    alignment = alignattn.align(model, "gan", weight=alignattn.Ramp(0.5, steps=4))
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, report_to=["tensorboard"]),
        train_dataset=data,
        callbacks=[alignment.callback()],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    layers = [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    for entry in logs:
        assert {"alignment_loss", "task_loss", "alignment_weight", *(f"alignment/{name}" for name in layers)} <= set(
            entry
        )
        assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["alignment_loss"], abs=2e-3)
    assert [entry["alignment_weight"] for entry in logs] == pytest.approx([0.0625, 0.3125, 0.5])  # means of two steps
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    told = events.Scalars("train/alignment_loss")
    assert [e.value for e in told] == pytest.approx([entry["alignment_loss"] for entry in logs])
    assert "train/task_loss" in events.Tags()["scalars"]


@pytest.mark.parametrize("method", ["gan", "ct", "mmd"])
def test_a_run_stopped_in_the_middle_and_resumed_is_the_unbroken_one(model, data, tmp_path, method):
    """Dropout included; weights, networks and both optimizers, to the bit."""
    start = copy.deepcopy(model.state_dict())
    ramp = alignattn.Ramp(0.5, steps=5)

    def begin(folder, **changes):
        model.load_state_dict(start)
        alignment = alignattn.align(model, method, weight=ramp)
        args = arguments(folder, save_strategy="steps", save_steps=3, **changes)
        return alignment, Trainer(model=model, args=args, train_dataset=data, callbacks=[alignment.callback()])

    alignment, trainer = begin(tmp_path / "whole")
    trainer.train()
    whole = copy.deepcopy(state_of(model, alignment))
    alignment.detach()

    alignment, trainer = begin(tmp_path / "broken")
    trainer.train()  # to its end: what comes after step 3 is thrown away
    alignment.detach()
    alignment, trainer = begin(tmp_path / "broken")
    trainer.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
    resumed = state_of(model, alignment)
    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_resuming_from_a_checkpoint_without_the_alignment_raises(model, data, tmp_path):
    alignment = alignattn.align(model, "gan")
    args = arguments(tmp_path, save_strategy="steps", save_steps=3)
    Trainer(model=model, args=args, train_dataset=data).train()
    alignment.detach()
    alignment = alignattn.align(model, "gan")
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[alignment.callback()])
    with pytest.raises(DataError, match=r"checkpoint-3, which holds no alignment.*alignment\.callback\(\)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_resuming_without_the_callback_raises(model, data, tmp_path):
    alignment = alignattn.align(model, "gan")
    args = arguments(tmp_path, save_strategy="steps", save_steps=3)
    Trainer(model=model, args=args, train_dataset=data, callbacks=[alignment.callback()]).train()
    alignment.detach()
    alignattn.align(model, "gan")
    trainer = Trainer(model=model, args=args, train_dataset=data)
    with pytest.raises(CaptureError, match=r"goes on from step 3.*callbacks=\[alignment\.callback\(\)\]"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def update(trainer_class, model, data, tmp_path, *, align, batch, accumulate, loss=None, wrap=True, **changes):
    """What one gradient does to a copy, without dropout."""
    still, model = model, make_classifier()
    model.load_state_dict(still.state_dict())
    kwargs = {}
    alignment = alignattn.align(model, "mmd", weight=0.5) if align else None
    if loss is not None:
        kwargs["compute_loss_func"] = alignment.loss_function(loss) if align and wrap else loss
    if issubclass(trainer_class, AlignmentTrainerMixin):
        kwargs["alignment"] = alignment
    cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    args = tiny_training.arguments(tmp_path, **ONE_GRADIENT, **cut, **changes)
    trainer_class(model=model, args=args, train_dataset=data, **kwargs).train()
    if alignment is not None:
        alignment.detach()
    return model.state_dict()


def squared(outputs, labels, num_items_in_batch=None):
    """A loss of one's own, normalised as the Trainer wants it."""
    per_sample = (outputs.logits[:, 0] - labels) ** 2
    return per_sample.sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("kind", ["plain", "label smoothing", "own loss"])
def test_the_term_reaches_the_gradient_however_the_loss_is_computed(kind, model, data, tmp_path):
    """The same term is added to the update in all three, for one batch of 16 and for 4 × 4."""
    plain = update(Trainer, model, data, tmp_path, align=False, batch=16, accumulate=1)
    aligned = update(Trainer, model, data, tmp_path, align=True, batch=16, accumulate=1)
    expected = {name: aligned[name] - plain[name] for name in plain}
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-4
    how = {"plain": {}, "label smoothing": {"label_smoothing_factor": 0.1}, "own loss": {"loss": squared}}[kind]
    for batch, accumulate in ((16, 1), (4, 4)):
        cut = {"batch": batch, "accumulate": accumulate}
        soft = update(Trainer, model, data, tmp_path, align=False, **cut, **how)
        for trainer in (AlignmentTrainer, Trainer):
            if trainer is Trainer and kind == "label smoothing":
                continue  # needs the mixin
            if trainer is AlignmentTrainer:
                found = update(trainer, model, data, tmp_path, align=True, wrap=False, **cut, **how)
            else:
                found = update(trainer, model, data, tmp_path, align=True, **cut, **how)
            for name, value in expected.items():
                torch.testing.assert_close(found[name] - soft[name], value, rtol=5e-3, atol=5e-6, msg=name)


def test_nothing_is_dropped_silently_with_label_smoothing_alone(model, data, tmp_path):
    alignattn.align(model, "mmd")
    trainer = Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=0.1), train_dataset=data)
    with pytest.raises(CaptureError, match=r"never used.*label smoothing.*AlignmentTrainer"):
        trainer.train()


def test_evaluation_is_left_alone(model, data, tmp_path):
    alignment = alignattn.align(model, "mmd")
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, label_smoothing_factor=0.1)
    trainer = AlignmentTrainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4], alignment=alignment)
    trainer.train()
    attached = trainer.evaluate()["eval_loss"]
    alignment.detach()
    assert trainer.evaluate()["eval_loss"] == attached


# Hosts that compute the loss themselves: TRL from the outputs, sentence-transformers from embeddings.


class FromOutputs(Trainer):
    """As TRL: gives the model its labels, and ignores the loss that comes back."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="sum")
        loss = loss / (len(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class FromEmbeddings(Trainer):
    """As sentence-transformers: no labels, a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**inputs)
        loss = outputs.logits.square().mean()
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class AlignedFromOutputs(AlignmentTrainerMixin, FromOutputs):
    pass


class AlignedFromEmbeddings(AlignmentTrainerMixin, FromEmbeddings):
    pass


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("host", [FromOutputs, FromEmbeddings])
def test_a_host_that_leaves_the_term_out_is_told_at_its_first_update(host, steps, model, data, tmp_path):
    alignattn.align(model, "mmd")
    trainer = host(model=model, args=arguments(tmp_path, max_steps=steps), train_dataset=data)
    with pytest.raises(CaptureError, match=r"TRL.*AlignmentTrainer or its mixin"):
        trainer.train()


@pytest.mark.parametrize("host", [AlignedFromOutputs, AlignedFromEmbeddings])
def test_the_mixin_adds_the_term_to_whatever_loss_there_is(host, model, data, tmp_path):
    expected = update(Trainer, model, data, tmp_path, align=True, batch=16, accumulate=1)
    plain = update(Trainer, model, data, tmp_path, align=False, batch=16, accumulate=1)
    for batch, accumulate in ((16, 1), (4, 4)):
        cut = {"batch": batch, "accumulate": accumulate}
        soft = update(host.__mro__[2], model, data, tmp_path, align=False, **cut)
        found = update(host, model, data, tmp_path, align=True, wrap=False, **cut)
        for name, value in expected.items():
            torch.testing.assert_close(found[name] - soft[name], value - plain[name], rtol=5e-3, atol=5e-6, msg=name)


def test_losses_that_cache_gradients_are_refused(bert, batch):
    """Embeddings without gradients first; then, within the backward of the loss, the model once more with them."""
    alignment = alignattn.align(bert, "mmd")
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        embedded = bert(**inputs).logits.requires_grad_()

    def again(gradient):
        with torch.enable_grad():
            bert(**inputs).logits.backward(gradient)

    embedded.register_hook(again)
    loss = embedded.square().mean()
    with pytest.raises(NothingCapturedError, match="cache gradients"):
        alignment.loss_function(lambda: loss)()
    with pytest.raises(CaptureError, match="cache"):
        loss.backward()


def test_a_whole_model_in_a_checkpoint_is_no_cache(bert, batch):
    alignment = alignattn.align(bert, "mmd", add_to_outputs=False)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    logits = torch.utils.checkpoint.checkpoint(lambda: bert(**inputs).logits, use_reentrant=False)
    (logits.square().mean() + alignment.loss()).backward()
    assert bert.bert.encoder.layer[0].attention.self.query.weight.grad is not None


def test_gradients_of_outputs_before_the_loss_are_no_forgotten_term(bert, batch):
    """A penalty on the gradient goes through the queries before the loss does, and a forward may come between."""
    alignattn.align(bert, "mmd")
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
    first = bert(**batch)
    torch.autograd.grad(first.logits.sum(), bert.classifier.weight, retain_graph=True)
    torch.autograd.grad(first.logits.sum(), bert.bert.embeddings.word_embeddings.weight, retain_graph=True)
    second = bert(**batch)
    (first.loss + second.loss).backward()
    optimizer.step()  # raises where the term is taken for forgotten


def test_a_detached_alignment_has_nothing_more_to_say(bert, batch):
    alignment = alignattn.align(bert, "mmd")
    bert(**batch).logits.sum().backward()
    alignment.detach()
    torch.optim.SGD(bert.parameters(), lr=0.1).step()
