"""Tables of learned positions reach as far as the context that the bundle promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import transformers

from headport.errors import ExportError
from headport.export.command import Options, export
from headport.export.position_tables import check_position_tables
from tests.conftest import VOCAB_SIZE, save_model
from tests.toy_bundles import register


def _model(places: str, rows: int = 8) -> ir.Model:
    model = ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["": 23, "headport": 1]>
        backbone (int64[batch, sequence] ids, int64[batch, total] mask, float[{rows}, 2] table,
                  float[5, 2] embed, int64 two) => (float[batch, sequence, 2] y)
        <int64[batch, sequence] p>
        {{
            p = headport.Positions (mask, ids)
            x = Gather (embed, ids)
            {places}
            y = Add (x, t)
        }}
        """
    )
    register(model, "table", np.zeros((rows, 2), np.float32))
    register(model, "embed", np.zeros((5, 2), np.float32))
    register(model, "two", np.array(2, np.int64))
    return model


@pytest.mark.parametrize(
    ("places", "longest"),
    [
        ("t = Gather (table, p)", 8),
        ("t = Gather <axis = 0> (table, p)", 8),
        ("q = Add (p, two) t = Gather (table, q)", 6),
        ("q = Mul (p, two) t = Gather (table, q)", 4),
    ],
)
def test_the_last_row_that_exists_may_be_read(places: str, longest: int) -> None:
    check_position_tables(_model(places), longest)
    with pytest.raises(ExportError, match="with 8 rows"):
        check_position_tables(_model(places), longest + 1)


@pytest.mark.parametrize(
    "places",
    [
        "t = Gather (table, ids)",  # by token, not by position
        "q = Add (p, ids) t = Gather (table, q)",  # by both
        "u = Identity (table) t = Gather <axis = 1> (u, ids)",
    ],
)
def test_other_tables_are_not_looked_at(places: str) -> None:
    check_position_tables(_model(places), 1000)


def test_a_checkpoint_that_promises_more_is_refused(tmp_path: Path) -> None:
    # Positions of OPT begin at row 2; its context is stated apart from the table.
    config = transformers.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
    )
    save_model(tmp_path / "m", config)
    export(Options(model=str(tmp_path / "m"), output=tmp_path / "b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headport.export.command.context_length", lambda _model: 41)
        with pytest.raises(ExportError, match="reads row 42 of a table of positions with 42 rows"):
            export(Options(model=str(tmp_path / "m"), output=tmp_path / "c"))
    assert not (tmp_path / "c").exists()
