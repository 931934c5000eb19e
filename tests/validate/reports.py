"""A complete report made by hand, for tests of whatever reads reports."""

from __future__ import annotations

from typing import Any

import msgspec

from headport.validate.distributions import (
    Bin,
    Breakdown,
    Calibration,
    CalibrationBin,
    Distributions,
    Histogram,
)
from headport.validate.evidence import (
    AttributedPart,
    Attribution,
    BisectedStage,
    Bisection,
    Flip,
    Flips,
    NoiseFloor,
    SamplerCase,
    SamplerParity,
)
from headport.validate.figures import FIGURES
from headport.validate.report import (
    CandidateFacts,
    Choice,
    DocumentSummary,
    GateResult,
    GreedyRun,
    MachineFacts,
    Metric,
    Metrics,
    Position,
    PositionSlice,
    Protocol,
    ReferenceFacts,
    Report,
    SliceReport,
    Timing,
)


def metrics(**changes: float | None) -> Metrics:
    """Figures of a good INT8 head, with intervals around those that have one."""
    values: dict[str, Any] = {
        "top1_agreement": 0.99,
        "top5_agreement": 0.98,
        "top10_agreement": 0.97,
        "top1_agreement_tie_adjusted": 0.995,
        "top5_agreement_tie_adjusted": 0.985,
        "top10_agreement_tie_adjusted": 0.975,
        "perplexity_reference": 20.0,
        "perplexity_candidate": 20.02,
        "perplexity_ratio": 1.001,
        "bits_per_byte_reference": 1.1,
        "bits_per_byte_candidate": 1.1002,
        "kl_mean": 4e-4,
        "kl_p99": 2e-3,
        "kl_max": 5e-3,
        "max_abs_logit_error": 0.2,
    }
    values = {figure.name: values.get(figure.name, 0.5) for figure in FIGURES} | changes
    return Metrics(
        **{
            figure.name: around(values[figure.name])
            if figure.interval
            else Metric(value=values[figure.name])
            for figure in FIGURES
        }
    )


def around(value: float | None, error: float = 1e-5) -> Metric:
    """A figure with a narrow interval."""
    if value is None:
        return Metric(value=None)
    return Metric(value=value, low=value - 2 * error, high=value + 2 * error, error=error)


def evidence(name: str, text: str) -> dict[str, Any]:
    """Every part that explains a verdict."""
    flip = Flip(
        slice=name,
        document=0,
        token=7,
        reference_top1=text,
        candidate_top1=text,
        margin=0.01,
        logit_noise=0.02,
    )
    part = AttributedPart(
        part="head",
        measured="both heads",
        kl_mean=4e-4,
        top1_agreement=0.99,
        nll_difference=1e-3,
        max_abs_logit_error=0.2,
    )
    case = SamplerCase(runtime="python", parameters="T = 1", draws=4, equal=4, first_difference="")
    return {
        "flips": Flips(
            positions=42,
            noise=0.02,
            noise_factor=6,
            near_ties=0,
            within_noise=1,
            beyond_noise=0,
            widest=(flip,),
        ),
        "attribution": Attribution(tokens=42, parts=(part,), largest="head", finding="the head"),
        "bisection": Bisection(
            tokens=42,
            noise="rounding",
            stages=(
                BisectedStage(stage="layer 0", error=1e-3, own_error=1e-3, noise=1e-5, limit=1e-4),
            ),
            first="layer 0",
            finding="layer 0 is the first",
        ),
        "noise_floor": NoiseFloor(
            path="eager",
            tokens=42,
            kl_mean=1e-12,
            top1_agreement=1.0,
            max_abs_logit_error=1e-5,
            perplexity_ratio=1.0,
        ),
        "sampler": SamplerParity(
            reference="transformers",
            positions=4,
            cases=(case,),
            distribution="one row",
            distribution_p_value=0.5,
            verdict="passed",
        ),
    }


def choices(text: str, first: float) -> tuple[Choice, ...]:
    """Ten tokens of falling probability."""
    return tuple(
        Choice(token=text, token_id=i, probability=first * (1 - first) ** i) for i in range(10)
    )


def distributions() -> Distributions:
    """Histograms, one breakdown and a calibration."""
    bins = (
        Bin(name="1–16", tokens=16, top1_agreement=around(0.98), kl_mean=around(5e-4)),
        Bin(name="17–64", tokens=26, top1_agreement=around(0.995), kl_mean=around(3e-4)),
    )
    return Distributions(
        kl=Histogram(edges=(1e-6, 1e-5, 1e-4, 1e-3), counts=(4, 30, 7), below=0, above=1),
        max_abs_logit_error=Histogram(edges=(0.01, 0.1, 1.0), counts=(30, 12), below=0, above=0),
        delta_logit=Histogram(edges=(-0.1, 0.0, 0.1), counts=(90, 110), below=1, above=0),
        delta_logit_sample="201 logits",
        breakdowns=(Breakdown(by="position", definition="place in the document", bins=bins),),
        calibration=Calibration(
            bins=(
                CalibrationBin(
                    low=0.5,
                    high=0.6,
                    reference_positions=42,
                    reference_confidence=0.55,
                    reference_accuracy=0.5,
                    candidate_positions=42,
                    candidate_confidence=0.54,
                    candidate_accuracy=0.5,
                ),
            ),
            reference_error=0.05,
            candidate_error=0.04,
        ),
    )


def report(name: str = "prose", text: str = "the head", **changes: Any) -> Report:
    """A report; `name` and `text` stand wherever a name or text from outside appears."""
    part = SliceReport(
        name=name,
        file=f"{name}.txt",
        sha256="0" * 64,
        bytes=100,
        bytes_scored=98,
        documents=1,
        tokens_scored=42,
        metrics=metrics(),
        greedy=(
            GreedyRun(
                document=0,
                prompt_tokens=8,
                new_tokens=4,
                first_divergence=2,
                reference_margin=1e-5,
                near_tie_bound=2e-5,
                near_tie=True,
                reference_text=text,
                candidate_text=text,
            ),
        ),
    )
    position = Position(
        slice=name,
        document=0,
        token=7,
        kl=5e-3,
        context=text,
        target=text,
        reference_top1=text,
        candidate_top1=text,
        reference_margin=0.01,
        reference_top=choices(text, 0.6),
        candidate_top=choices(text, 0.55),
    )
    made = Report(
        schema_version=5,
        verdict="passed",
        date="2026-01-01T00:00:00+00:00",
        headport="0.1.0",
        gates=(
            GateResult(
                metric="kl_mean",
                slice=None,
                min=None,
                max=2e-3,
                margin=0.0,
                by="interval",
                value=4e-4,
                low=3.8e-4,
                high=4.2e-4,
                verdict="passed",
                reason="",
                detectable=3e-5,
                tokens_needed=None,
                tokens_recommended=None,
            ),
        ),
        gates_source="defaults of int8",
        baseline=None,
        regressions=(),
        tokens_scored=42,
        documents=1,
        bytes_scored=98,
        metrics=metrics(),
        bootstrap={"kl_mean": (3.8e-4, 4.2e-4)},
        slices=(part,),
        position_slices=(
            PositionSlice(name="@rare", definition="seldom", tokens_scored=4, metrics=metrics()),
        ),
        by_document=(
            DocumentSummary(
                slice=name,
                document=0,
                tokens=42,
                weight=1.0,
                nll_reference=3.0,
                nll_candidate=3.001,
                kl=4e-4,
                top1_agreement=0.99,
            ),
        ),
        distributions=distributions(),
        **evidence(name, text),
        worst=(position,),
        notes=(text,),
        protocol=Protocol(
            description="in short",
            documents="blocks",
            counting="once",
            special_tokens="nothing before, nothing after",
            window=64,
            overlap=0,
            ignored_ids=(),
            top_only=False,
            weights="every token counts once",
            confidence="95 %",
            context=64,
            batch_size=1,
            chunk=512,
            max_tokens=0,
            near_tie_bound="formula",
            near_tie_bound_median=1e-5,
            near_tie_bound_max=2e-5,
            head_slope=1.0,
            greedy_prompts=2,
            greedy_prompt_tokens=32,
            greedy_new_tokens=4,
        ),
        reference=ReferenceFacts(
            checkpoint=name,
            format="safetensors",
            sha256="1" * 64,
            model="LlamaForCausalLM",
            dtype="float32",
            parameters=1000,
            attention="sdpa",
            tokenizer="Tokenizer",
            vocab_size=257,
            threads=1,
            versions={"torch": "2"},
        ),
        candidate=CandidateFacts(
            bundle=name,
            manifest_sha256="2" * 64,
            files={"backbone.onnx": "3" * 64},
            checkpoint=name,
            checkpoint_sha256="1" * 64,
            stages=("export", "quantize"),
            target="portable",
            dtype="fp32",
            recipe="int8",
            head="int8 block 64, activations residual",
            session_options={"session.qdq_matmulnbits_accuracy_level": "0"},
            provider="CPUExecutionProvider",
            threads=1,
            versions={"onnxruntime": "1"},
        ),
        machine=MachineFacts(
            system="Linux", cpu="a CPU", cpus=2, memory_bytes=8 << 30, python="3.11"
        ),
        timing=Timing(reference=2.0, candidate=1.5, metrics=0.2, total=2.5, greedy=0.5, extra=0.1),
    )
    return msgspec.structs.replace(made, **changes)
