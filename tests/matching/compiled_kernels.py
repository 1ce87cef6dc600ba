"""Kernels are compiled to machine code of accelerators that are not here: what the interpreter lets pass may not be.

What would be launched is compiled instead, and nothing is computed. ptxas comes with Triton.
"""

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import torch

from alignattn.config import METHODS, resolve
from alignattn.functional import optimal_transport
from alignattn.matching import kernels
from alignattn.matching.at_once import differentiate

triton = pytest.importorskip("triton", reason="pip install triton")
ROOM = {80: 163 * 2**10, 90: 227 * 2**10}  # bytes that a block may share
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WIDTH = 64


class Absent:
    """Stands where Triton looks for a driver: it tells of an accelerator, and none is there to launch on."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # what was compiled for one device is not compiled again for it

    def get_current_stream(self, device=None):
        return 0


@pytest.fixture
def compiled(request, monkeypatch):
    """What was compiled so far, by name and hash."""
    found = {}

    def compile_only(kernel, programs, *given, **settings):
        assert programs > 0
        made = kernel.warmup(*given, grid=(programs,), **settings)
        found[kernel.__name__, made.hash] = made

    def serve(tensor, *, widest=kernels.WIDEST, dtypes=kernels.SINGLE):
        return tensor.dtype in dtypes and tensor.shape[-1] <= widest

    monkeypatch.setattr(kernels, "serve", serve)
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        file = importlib.import_module(module.name)
        if hasattr(file, "launch"):
            monkeypatch.setattr(file, "launch", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Absent(request.param))
    return found


def stack_of(made, folder):
    """Bytes for each thread, in memory, of what registers do not hold."""
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


def check(found, capability, folder, *, stack=None):
    for (name, _), made in found.items():
        assert made.metadata.shared <= ROOM[capability], name
        assert stack is None or stack_of(made, folder) <= stack, name


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(90, HALF), (90, SINGLE), (80, SINGLE)],
    indirect=["compiled"],
    ids=["Hopper, half", "Hopper, single", "Ampere, single"],
)
@pytest.mark.parametrize(("method", "expected"), [("gan", 6), ("ot", 5), ("ct", 8), ("mmd", 5)])
def test_a_matching_and_its_way_back(method, expected, dtype, compiled, request, tmp_path):
    matcher = METHODS[method][0](resolve(method, None, "stable", {}).matcher)
    matcher.ensure(["a", "b"], WIDTH, torch.device("cpu"))
    query, key = (torch.randn(2, 2, 3, 150, WIDTH).to(dtype) for _ in range(2))
    mask = torch.ones(2, 2, 150, dtype=torch.bool)
    differentiate(matcher, query, key, mask, mask, ["a", "b"], torch.ones(2, 2, 3))
    assert len(compiled) >= expected, sorted(compiled)
    capability = request.node.callspec.params["compiled"]
    # What forms were chosen by is a Hopper. An Ampere, for which nobody has, has to hold them.
    # Registers hold no sums for all weights of the game's discriminator: what is left over was seen to cost less than
    # smaller tiles.
    most = {HALF: 640, SINGLE: 2048}[dtype] if capability == 90 else None
    check(compiled, capability, tmp_path, stack=most)


@pytest.mark.parametrize("compiled", [80, 90], indirect=True, ids=["Ampere", "Hopper"])
@pytest.mark.parametrize("tokens", [128, 2048])
def test_transport_between_problems_short_and_long(tokens, compiled, request, tmp_path):
    query, key = (torch.randn(1, 2, tokens, WIDTH) for _ in range(2))
    with torch.no_grad():
        optimal_transport(query, key, epsilon=0.05, max_iterations=1)
    assert compiled
    check(compiled, request.node.callspec.params["compiled"], tmp_path, stack=2048)
