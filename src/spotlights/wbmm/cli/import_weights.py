"""``spotlights wbmm import``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from spotlights.wbmm.cli.common import needs_vision

if TYPE_CHECKING:
    from spotlights.wbmm.recipes.importing import Imported


def add_import(verbs: Any) -> None:
    """Add ``import``."""
    parser = verbs.add_parser(
        "import",
        help="turn a file of the paper's release into weights for timm, eval and predict",
        description="Read a weights file of the paper's release without running code from it, check it against the "
        "named network and write it as safetensors, for timm and for eval and predict here.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="weights of the release, .pth or .safetensors")
    parser.add_argument("--model", required=True, metavar="NAME", help="the network they belong to, such as wbmm_tiny")
    parser.add_argument("--out", required=True, metavar="FILE", help="new .safetensors file")
    parser.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    with needs_vision():
        from spotlights.wbmm.recipes.importing import import_weights

        _print(import_weights(arguments.file, arguments.model, arguments.out))
    return 0


def _print(imported: Imported) -> None:
    kind = "folded for inference" if imported.folded else "plain"
    head = f"{imported.classes:,} classes" if imported.classes else "no classifier, norms of a dense backbone"
    source = f'file="{imported.out}"'
    arguments = "".join(f", {name}={value!r}" for name, value in imported.arguments.items() if name != "dense")
    if not imported.classes:
        arguments += ", features_only=True"
    elif imported.classes != 1000:
        arguments += f", num_classes={imported.classes}"
        source += f", num_classes={imported.classes}"
    lines = {
        "network": f"{imported.model}, {imported.parameters:,} parameters, {head}, {kind}",
        "weights": str(imported.out),
        "use": f'timm.create_model("{imported.model}", pretrained=True{arguments}, '
        f"pretrained_cfg_overlay=dict({source}))",
    }
    if imported.classes:
        lines["or"] = f"spotlights wbmm predict {imported.out} IMAGE"
    for name, value in lines.items():
        print(f"{name:<20} {value}")
