"""What tests share: networks with all parameters drawn, the CPU library at every instruction set."""

import dataclasses

import pytest
import torch
from torch import nn

from spotlights.runtime.native import LEVELS
from spotlights.wbmm.backends import cpu

BEST = 0 if isinstance(cpu.LIBRARY, str) else int(cpu.LIBRARY.functions.spotlights_best_level())


@pytest.fixture
def randomise():
    """Function (model) -> model in eval mode whose norms, scales and tables are all far from their first values."""

    def randomised(model):
        torch.manual_seed(1)
        with torch.no_grad():
            for name, value in model.named_parameters():
                last = name.rpartition(".")[2]
                if last == "gamma":
                    value.uniform_(0.1, 0.3).mul_(torch.randn_like(value).sign())
                elif last in ("weight", "local_weight") and value.ndim == 3:
                    value.normal_(0, 0.1)
                elif value.ndim == 1:
                    value.normal_(1 if last == "weight" else 0, 0.5)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.running_mean.normal_(0, 0.5)
                    module.running_var.uniform_(0.3, 2)
        return model.eval()

    return randomised


@pytest.fixture(params=range(BEST + 1), ids=LEVELS[: BEST + 1])
def level(request, monkeypatch):
    if isinstance(cpu.LIBRARY, str):
        pytest.skip(cpu.LIBRARY)
    monkeypatch.setattr(cpu, "LIBRARY", dataclasses.replace(cpu.LIBRARY, level=request.param))
    return request.param


@pytest.fixture
def poison():
    """Uninitialised memory is NaN, so that a value never written is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
