"""No test here may leave anything behind that another could see."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as nn_module


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.backends.mha.get_fastpath_enabled() and torch.is_grad_enabled()
    assert not nn_module._global_forward_hooks and not nn_module._global_forward_pre_hooks
