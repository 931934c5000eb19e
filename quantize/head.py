"""One head quantised as its options say: graphs, manifest entry, and what was done to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.errors import QuantizeError, UsageError
from headport.graphs import load_graphs
from headport.ledger import head_weight, read_tensor
from headport.manifest import Head, Quantization
from headport.quantize.calibration import Calibration, compensated_rounder, loss_ratio
from headport.quantize.chosen_heads import chosen_heads
from headport.quantize.formats import FORMATS, Format, StoredWeight
from headport.quantize.head_pass import find_product, store_head_weight
from headport.quantize.options import Options
from headport.quantize.rescoring import Rescoring, add_rescoring
from headport.quantize.static_pass import round_hidden_states

__all__ = ["HEAD", "QuantisedHead", "check_options", "quantise_head"]

HEAD = "lm"
_HEADS = tuple(name for name in FORMATS if name not in ("int4-positive", "uint4"))  # have options


@dataclass(frozen=True)
class QuantisedHead:
    """A head whose weight has been stored anew; nothing of it is written yet."""

    entry: Head
    models: dict[str, ir.Model]  # its graph, and the one that gives all logits beside candidates
    stored: StoredWeight
    bias: npt.NDArray[np.float32] | None
    weight_bytes: int  # of the weight before
    loss_ratio: float | None  # of compensated rounding; None where it is nearest
    positive_scales: bool = False  # asked for

    @property
    def chosen(self) -> dict[str, Any]:
        """What was asked for, with every default filled in."""
        quantization, form = self.entry.quantization, self.entry.candidates
        assert quantization is not None
        chosen: dict[str, Any] = {
            "head": quantization.format,
            "block": quantization.block,
            "activations": quantization.activations,
            "symmetric": quantization.symmetric,
            "rounding": quantization.rounding,
        }
        if self.positive_scales:
            chosen["positive_scales"] = True
        if form is not None:
            chosen |= {"rescore": form.count, "certify": form.certified}
            chosen |= {"bound": form.bound} if form.certified else {}
        return chosen


def quantise_head(
    source: Bundle, options: Options, calibration: Calibration | None = None, name: str = HEAD
) -> QuantisedHead:
    """Store a head's weight as its options say.

    Args:
        source: Portable bundle; not changed.
        options: Recipe of the head.
        name: The head, or the part of one.
        calibration: Hidden states to compensate errors for; needed if `options.calibration` is
            given.

    Raises:
        UsageError: If the options contradict each other.
        QuantizeError: If the head is quantised already, or cannot be stored as asked.
    """
    quantization, kind, count = check_options(options)
    assert (calibration is not None) == (quantization.rounding == "compensated")
    head = chosen_heads(source, [name])[name]
    entry, initializer = head_weight(source.manifest, head)
    model = load_graphs(source)[head.graph]
    product = find_product(model, initializer)
    bias = _bias(product)
    weight = read_tensor(source, entry)
    block = quantization.block or 0
    rounder, gain = None, None
    if calibration is not None and kind.grid is not None:
        gain = loss_ratio(weight, block or weight.shape[1], kind.grid, calibration)
        rounder = compensated_rounder(calibration)
    stored = kind.store(weight, block, rounder)
    name = store_head_weight(model, initializer, stored, kind, block)
    if quantization.activations == "static":
        assert calibration is not None, "check_options wants texts"
        round_hidden_states(model, product, calibration.largest)
    changed = msgspec.structs.replace(head, weight=name, tied=False, quantization=quantization)
    models = {head.graph: model}
    if count:
        asked = Rescoring(
            count=count,
            bound=options.bound if options.certify else None,
            original=entry,
            initializer=initializer,
            stored=stored.tensors,
            bias=bias,
        )
        form, full = add_rescoring(source, model, changed, asked)
        changed = msgspec.structs.replace(changed, outputs="candidates", candidates=form)
        models[form.full] = full
    return QuantisedHead(changed, models, stored, bias, entry.length, gain, options.positive_scales)


def check_options(options: Options) -> tuple[Quantization, Format, int]:
    """The manifest's entry, the row of `FORMATS` and the number of candidates options ask for.

    Raises:
        UsageError: If they contradict each other.
    """
    quantization = _quantization(options)
    kind = FORMATS[_format(options)]
    return quantization, kind, _candidate_count(options, kind)


def _format(options: Options) -> str:
    """Key of `FORMATS`."""
    forms = {
        "--asymmetric": ("uint4", options.asymmetric, "has no zero points"),
        "--positive-scales": ("int4-positive", options.positive_scales, "has no scale below 0"),
    }
    asked = {option: form for option, (form, given, _) in forms.items() if given}
    for option in asked:
        if options.head != "int4":
            raise UsageError(f"{option} needs --head int4; {options.head} {forms[option][2]}")
    if len(asked) > 1:
        raise UsageError("--positive-scales: scales beside zero points are positive; leave it out")
    return next(iter(asked.values()), options.head)


def _quantization(options: Options) -> Quantization:
    # Python callers may hand over a record that no command line or recipe has checked.
    kind = FORMATS.get(_format(options))
    if kind is None or options.head == "none" or options.head not in _HEADS:
        raise UsageError(f"--head {options.head}: use one of {', '.join(_HEADS)}")
    activations = ("residual", "rounded", "exact", "static")
    if options.activations not in activations:
        raise UsageError(
            f"--activations {options.activations}: use one of {', '.join(activations)}"
        )
    if options.activations == "static":
        _check_static(options)
    if options.block is not None and options.block not in kind.blocks:
        allowed = ", ".join(map(str, sorted(kind.blocks))) or "none: it has no blocks"
        raise UsageError(f"--block {options.block}: --head {options.head} takes {allowed}")
    if kind.grid is None:
        for name, given in (
            ("--activations rounded", options.activations == "rounded"),
            ("--calibration", bool(options.calibration)),
        ):
            if given:
                raise UsageError(
                    f"{name} has no meaning for --head {options.head}, whose products are "
                    "computed in float32; leave it out"
                )
    return Quantization(
        format=options.head,
        block=options.block or (kind.blocks[0] if kind.blocks else None),
        activations=options.activations if kind.grid else "exact",
        symmetric=not options.asymmetric,
        rounding="compensated" if options.calibration else "nearest",
    )


def _check_static(options: Options) -> None:
    if options.head != "int8-row" or not options.calibration:
        raise UsageError(
            "--activations static needs --head int8-row and --calibration, whose texts give the "
            "scale"
        )
    if options.rescore is not None or options.certify:
        raise UsageError("--activations static gives all logits; leave out --rescore and --certify")


def _candidate_count(options: Options, kind: Format) -> int:
    asked = options.rescore
    if asked is None and not options.certify:
        return 0
    if asked is not None and asked < 0:
        raise UsageError(f"--rescore {asked}: at least 1 candidate was expected")
    if not kind.candidates:
        raise UsageError(
            f"--rescore and --certify need integers; products of --head {options.head} are not "
            "rounded enough to gain from them"
        )
    if options.certify and not kind.certifiable:
        raise UsageError(
            f"--certify needs --head int8: the errors of {options.head} are so large that no rank "
            "would be proved; use --rescore"
        )
    return asked or kind.candidates


def _bias(product: ir.Node) -> npt.NDArray[np.float32] | None:
    value = product.inputs[2] if len(product.inputs) > 2 else None
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise QuantizeError(f"the head's bias {value.name} is not a constant")
    return tensor.numpy().astype(np.float32)
