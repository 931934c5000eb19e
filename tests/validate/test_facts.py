"""Facts about a bundle that its report states."""

from __future__ import annotations

from headport.manifest import BackboneQuantization, Head, Model, StoredMatrix
from headport.validate.gates import DEFAULT_GATES, recipe_name


def test_the_coarsest_format_of_the_backbone_counts_too() -> None:
    model = Model(architecture="M", hidden_size=8, layers=1, max_context=8, dtype="fp32")
    head = Head(
        graph="head.lm",
        outputs="logits",
        vocab_size=9,
        scale=1.0,
        softcap=None,
        bias=False,
        weight="w",
        tied=False,
        quantization=None,
    )

    def name(matrices: str | None, embedding: str | None) -> str:
        def stored(form: str | None) -> dict[str, StoredMatrix]:
            return {} if form is None else {"m": StoredMatrix(format=form, block=None)}  # type: ignore[arg-type]

        record = BackboneQuantization(
            matrices=stored(matrices), embedding=stored(embedding), activations="exact"
        )
        return recipe_name(model, head, record)

    found = [name(None, None), name("fp16", None), name("fp16", "int8"), name("int4", "int8")]
    assert found == ["fp32", "fp16", "int8", "int4"]
    assert set(found) <= DEFAULT_GATES.keys()
