"""The chain from the checkpoint to what ran, and the facts of both sides."""

from __future__ import annotations

from headport.validate.report import Report
from headport.validate.tables import report_sections
from headport.validate.views.grid import folded, section_table
from headport.validate.views.markup import Markup, element, joined

__all__ = ["provenance"]

_FACTS = ("Protocol", "Reference", "Candidate", "Machine and time")


def provenance(report: Report) -> Markup:
    """Checkpoint, stages, bundle, run; below it every fact that was recorded."""
    candidate, reference = report.candidate, report.reference
    same = candidate.checkpoint_sha256 == reference.sha256
    of_reference = (
        "the same weights as the bundle's checkpoint"
        if same
        else "OTHER weights than the bundle's checkpoint"
    )
    links = [
        ("checkpoint", candidate.checkpoint, candidate.checkpoint_sha256),
        *((stage, "stage of the bundle", "") for stage in candidate.stages),
        ("bundle", candidate.bundle, candidate.manifest_sha256),
        ("run", f"{candidate.provider}, {candidate.threads} threads, {_options(report)}", ""),
        ("held against", f"{reference.checkpoint}, {of_reference}", reference.sha256),
        ("report", f"headport {report.headport}, {report.date}", ""),
    ]
    files = element(
        "ul",
        *(
            element("li", f"{name} ", element("code", sha256))
            for name, sha256 in candidate.files.items()
        ),
    )
    tables = [s for s in report_sections(report) if s.title in _FACTS]
    return joined(
        element("ol", *(_link(*link) for link in links), class_="chain"),
        folded(f"sha256 of the bundle's {len(candidate.files)} files", files),
        *(folded(table.title, section_table(table)) for table in tables),
    )


def _options(report: Report) -> str:
    options = report.candidate.session_options
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "no session options"


def _link(what: str, text: str, sha256: str) -> Markup:
    digest = element("code", f" sha256 {sha256}") if sha256 else Markup("")
    return element("li", element("b", what), text, digest)
