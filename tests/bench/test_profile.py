"""What the device does in a step, added up."""

from types import SimpleNamespace

import pytest
import torch

from alignattn.bench import plan, profile
from alignattn.bench.workload import Shape
from alignattn.errors import ConfigError

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::Add<int>, std::array<char*, 3>>(int, at::Add<int>)"
OF_MANY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::(anonymous namespace)::A<4>>(at::A<4>)"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_sums", "_sums"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        (ELEMENTWISE, "vectorized_elementwise_kernel"),
        (OF_MANY, "multi_tensor_apply_kernel"),
    ],
)
def test_kernels_are_called_by_their_own_names(name, short):
    assert profile._short(name) == short


def test_time_in_which_several_run_beside_each_other_counts_once():
    # 0 to 4 and 2 to 5 are five thousand microseconds together, with 1 to 3 within; 6 to 7 another thousand.
    times = ((2, 5), (0, 4), (6, 7), (1, 3))
    ran = [SimpleNamespace(time_range=SimpleNamespace(start=1e3 * a, end=1e3 * b)) for a, b in times]
    assert profile._union(ran) == pytest.approx(6.0)


def test_a_part_about_accelerators_is_refused_elsewhere():
    with pytest.raises(ConfigError, match="'device' is about an accelerator, and the device is 'cpu'"):
        plan.Plan(torch.device("cpu"), parts=["device"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_method_adds_its_kernels_to_those_of_soft_attention():
    shape = Shape("tiny", 2, 128, 4, 4, 64, "bf16", vocabulary=100)
    soft, mmd, *more = profile.by_kernels(shape, ["mmd"], torch.device("cuda"))
    assert (soft.name, mmd.name, soft.details["of_soft"]) == ("soft", "mmd", 1.0)
    assert mmd.details["device_ms"] > soft.details["device_ms"] and mmd.details["launches"] > soft.details["launches"]
    assert "mmd: _sums" in [row.name for row in more]
