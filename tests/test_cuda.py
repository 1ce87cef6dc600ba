"""On an accelerator: the same losses as on the CPU, nothing waits for the device, NaN is named one step later."""

import copy
import warnings

import pytest
import torch

import alignattn
from alignattn import stacks
from alignattn.bench.memory import peak
from alignattn.devices import Arriving
from alignattn.errors import NonFiniteError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = ["gan", "ot", "ct", "mmd"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_losses_and_gradients_are_those_of_the_cpu(bert, batch, method, generator):
    bert.eval()
    for layer in bert.bert.encoder.layer:
        layer.attention.self.train()
        layer.attention.self.dropout.p = 0.0
    found = {}
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(bert).to(device)
        alignment = alignattn.align(model, method, generator=generator)
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        losses = []
        for _ in range(3):  # the adversary steps in between
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.item())
        found[device] = losses, model.bert.encoder.layer[1].attention.self.query.weight.grad.cpu()
        alignment.detach()
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-4)
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["gan", "ct", "mmd"])
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_a_step_waits_for_nothing(bert, batch, method, generator):
    model = bert.cuda()
    plain = copy.deepcopy(model)
    inputs = {name: tensor.cuda() for name, tensor in batch.items()}
    inputs["attention_mask"] = inputs["attention_mask"].bool()
    alignattn.align(model, method, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    step()
    step()

    def plain_step():
        plain(**inputs).loss.backward()

    before = _synchronisations(plain_step)
    assert _synchronisations(step) <= before


def _synchronisations(work):
    """How often `work` waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


def test_nan_names_its_layer_one_step_later():
    alignment = alignattn.Alignment("mmd")
    query, key = torch.randn(2, 2, 4, 8, device="cuda"), torch.randn(2, 2, 4, 8, device="cuda")
    query[0, 0, 0, 0] = torch.nan
    alignment.record(query, key, name="encoder.1")
    alignment.loss()
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteError, match=r"encoder\.1"):
        alignment.record(query, key, name="encoder.1")


def test_networks_follow_the_model_to_the_device(encoder):
    alignment = alignattn.align(encoder, "gan")
    encoder(torch.randn(2, 5, 16))
    alignment.loss().backward()
    encoder.cuda()
    for _ in range(2):
        encoder(torch.randn(2, 5, 16, device="cuda"))
        alignment.loss().backward()
    assert all(p.is_cuda and p.isfinite().all() for p in alignment.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_autocast_and_scaler_train(bert, batch, method, dtype):
    model = bert.cuda()
    inputs = {name: tensor.cuda() for name, tensor in batch.items()}
    alignattn.align(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert loss.isfinite() and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_training_by_records_is_training(bert, batch, method, precision, monkeypatch):
    monkeypatch.setattr(stacks, "FEWEST", 1)  # a layer is matched while the next is to come
    monkeypatch.setattr(stacks, "LARGE", 0)

    def refuse(work):
        raise RuntimeError

    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for recorder in (refuse, None):
        model = copy.deepcopy(bert).cuda().train()
        alignment = alignattn.align(model, method)
        alignment.objective.recorder = recorder
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for step in range(16):
            inputs = {name: tensor.cuda() for name, tensor in batch.items()}
            inputs["input_ids"] = (inputs["input_ids"] + step) % 45 + 1
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        replays = alignment.objective._replays[0]
        assert replays.refused == (recorder is refuse), replays.reason
        assert bool(replays._records) == alignment.objective.ahead.expects == (recorder is None)
        found.append((torch.stack(losses).cpu(), model.bert.encoder.layer[1].attention.self.query.weight.detach()))
        alignment.detach()
    rough = precision == "bf16"
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2 if rough else 1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=2e-2 if rough else 1e-3, atol=1e-4 if rough else 1e-6)


def test_nan_is_named_by_records_too(bert, batch):
    model = bert.cuda().train()
    alignattn.align(model, "mmd", weight=0.1)
    inputs = {name: tensor.cuda() for name, tensor in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(6):
        model(**inputs).loss.backward()
        optimizer.step()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    model(**inputs).loss.backward()
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteError, match=r"layer\.1"):
        optimizer.step()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_streamed_layers_feel_what_they_feel_together(bert, batch, method, checkpointed):
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for stream in (None, "layer"):
        model = copy.deepcopy(bert).cuda().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        alignattn.align(model, method, weight=0.5, stream=stream)
        loss = model(**{name: tensor.cuda() for name, tensor in batch.items()}).loss
        loss.backward()
        found.append((loss.detach(), model.bert.encoder.layer[0].attention.self.key.weight.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


def test_packed_rows_feel_by_records_what_they_feel_plainly():
    from transformers import LlamaConfig, LlamaForCausalLM

    def refuse(work):
        raise RuntimeError

    config = LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).train()
    ids = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 5]]).cuda()
    found = []
    for recorder in (refuse, None):
        model = copy.deepcopy(plain).cuda()
        alignment = alignattn.align(model, "mmd", weight=0.5, recentre=False)
        alignment.objective.recorder = recorder
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for _ in range(6):
            optimizer.zero_grad()
            model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
            optimizer.step()
        found.append(model.model.layers[1].self_attn.k_proj.weight.grad)
        assert (recorder is refuse) != any(replays._records for replays in alignment.objective._replays)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_training_is_training_by_records(bert, batch, method, precision):
    """The matching is an operator there, which records and replays as it does elsewhere."""
    bert.cuda()
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = {name: tensor.cuda() for name, tensor in batch.items()}
    found = {}
    for compiled in (False, True):
        torch.compiler.reset()
        model = copy.deepcopy(bert).train()
        alignment = alignattn.align(model, method, weight=0.3)
        called = torch.compile(model, fullgraph=True) if compiled else model
        weight = model.bert.encoder.layer[1].attention.self.key.weight
        start = weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = called(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[compiled] = losses, (weight - start).detach()
        assert any(replays._records for replays in alignment.objective._replays)
        alignment.detach()
    allowed = 1e-3 if precision == "fp32" else 2e-2
    assert found[True][0] == pytest.approx(found[False][0], rel=allowed)
    off = (found[True][1] - found[False][1]).norm() / found[False][1].norm()
    assert off < 10 * allowed


def test_memory_that_a_record_works_in_is_counted():
    """A graph that was made of the third call holds sixteen megabytes from then on, and no tensor is there."""
    held = torch.zeros(2**18, device="cuda")
    records = []

    def call():
        if len(records) == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                (held.repeat(8) * 2).sum(0)  # two of eight megabytes
            records.append(graph)
        elif len(records) > 2:
            records[2].replay()
        else:
            records.append(None)

    assert 15e6 < peak(call, torch.device("cuda"), settling=3) < 60e6
    assert peak(call, torch.device("cuda"), settling=3) < 1e6  # is there already


def test_numbers_arrive_as_they_were_when_they_were_sent():
    """Whatever is written over them since, as a record's next replay does; and copies of them can be made."""
    values = torch.arange(5.0, device="cuda")
    arriving = Arriving(values)
    values.zero_()
    assert copy.deepcopy(arriving).values().tolist() == arriving.values().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert arriving.are_here() and not arriving.values().is_cuda
