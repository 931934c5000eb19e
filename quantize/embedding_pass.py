"""Rewriting a portable backbone so that its input embedding is stored in fewer bits.

    Gather(W [V, H], ids)
      →  int8: DequantizeLinear(Gather(W.int8, ids), Gather(W.scale, ids), axis=-1, block_size)
         fp16: Cast<float>(Gather(W.fp16, ids))

Only the rows of the tokens at hand are read and restored, and they are exactly the rows of Ŵ.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.lowering.emit import Emitter, replace
from headport.lowering.matrices import Table
from headport.manifest import StoredMatrix
from headport.quantize.backbone_pass import register_stored
from headport.quantize.formats import StoredWeight

__all__ = ["store_table"]


def store_table(model: ir.Model, table: Table, stored: StoredWeight, how: StoredMatrix) -> None:
    """Put a stored table in the place of a weight, in all lookups that read it.

    Args:
        model: The backbone; changed in place.
        table: The weight and its lookups.
        stored: W [V, H] as `how` says.
        how: Format and block.
    """
    values = register_stored(model, table.name, stored)
    for number, gather in enumerate(table.gathers):
        prefix = table.name if number == 0 else f"{table.name}.{number}"
        emit = Emitter(model.graph, gather, prefix)
        found = [emit.op("Gather", [v, gather.inputs[1]], f"row_{s}") for s, v in values.items()]
        if how.format == "int8":
            row = emit.op("DequantizeLinear", found, "rows", axis=-1, block_size=how.block)
        else:
            row = emit.op("Cast", found, "rows", to=ir.DataType.FLOAT)
        if table.value.dtype not in (None, ir.DataType.FLOAT):
            row.type = ir.TensorType(ir.DataType.FLOAT)
            row = emit.op("Cast", [row], "rows_typed", to=table.value.dtype)
        replace(model.graph, gather, [row])
    assert table.value.name is not None
    del model.graph.initializers[table.value.name]
