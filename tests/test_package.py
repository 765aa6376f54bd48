"""What importing the package costs."""

import subprocess
import sys

EXTRAS = (
    "timm", "torchvision", "lightning", "torchmetrics", "matplotlib", "rich", "yaml", "safetensors", "mlxtend",
    "pandas", "sklearn", "PIL",
)  # fmt: skip


def _modules_after(statement):
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_import_is_light():
    # torch itself may load an extra that is installed: what counts is what the package adds.
    added = _modules_after("import spotlights.wbmm, spotlights.cli") - _modules_after("import torch")
    assert not added & set(EXTRAS)
    assert "torch" not in _modules_after("import spotlights")
