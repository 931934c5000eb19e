"""A report as one self-contained HTML page, which loads nothing.

The page's policy lets its own style and script run, each named by its hash, and nothing else: a
text that should slip through the escaping could neither run nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from headport.validate.evidence import Metric
from headport.validate.recipes import RecipeSweep
from headport.validate.report import Report
from headport.validate.views.markup import Markup, element, joined
from headport.validate.views.recipes import recipes
from headport.validate.views.sections import PARTS

__all__ = ["render_page"]

_SAYS = {
    "passed": "the bundle answers like the reference within its limits",
    "failed": "the bundle does not answer like the reference: a limit was exceeded",
    "undecided": "the sample does not say whether the limits hold",
}


_BEFORE_RECIPES = "drift"  # the part that they follow


def render_page(report: Report, sweep: RecipeSweep | None = None) -> str:
    """The whole report; nothing in a text or name can become markup.

    Args:
        report: What was measured.
        sweep: Recipes for the head of the same model, to be shown beside it.
    """
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    contents = [(name, title, content(report)) for name, title, content in PARTS]
    if sweep is not None:
        at = [name for name, _, _ in contents].index(_BEFORE_RECIPES) + 1
        contents.insert(at, ("recipes", "Recipes for the head", recipes(sweep, report)))
    shown = [part for part in contents if part[2]]
    title = f"{report.candidate.bundle}: {report.verdict}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # The policy holds for what follows it.
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("title", f"Validation: {title}"),
        element("style", style),
    )
    body = element(
        "body",
        element("a", "Skip to the gates", href="#gates", class_="skip"),
        _header(report),
        element("nav", element("ul", *(_entry(*part) for part in shown)), aria_label="Contents"),
        element("main", *(_part(*part) for part in shown)),
        element("script", script),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _resource(name: str) -> Markup:
    return Markup((files("headport.validate.views") / name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _entry(name: str, title: str, _content: Markup) -> Markup:
    return element("li", element("a", title, href=f"#{name}"))


def _part(name: str, title: str, content: Markup) -> Markup:
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, content, id=name, aria_labelledby=f"{name}-title")


def _header(report: Report) -> Markup:
    passed = sum(gate.verdict == "passed" for gate in report.gates)
    names = ", ".join(part.name for part in report.slices)
    verdict = element("span", report.verdict.capitalize(), class_=f"badge {report.verdict}")
    return element(
        "header",
        element(
            "p", "headport validation: an exported model against its original", class_="kicker"
        ),
        element("button", "Theme: auto", id="theme", type="button", hidden=True),
        element("h1", verdict, element("bdi", report.candidate.bundle)),
        element(
            "p",
            f"{_SAYS[report.verdict].capitalize()}. {passed} of {len(report.gates)} gates passed, "
            f"on {report.tokens_scored:,} tokens of {report.documents:,} documents ({names}).",
            class_="lead",
        ),
        _cards(report),
    )


def _cards(report: Report) -> Markup:
    metrics = report.metrics
    agreement, kl = metrics.top1_agreement, metrics.kl_mean
    ratio, largest = metrics.perplexity_ratio, metrics.max_abs_logit_error
    cards = (
        ("Same first choice", agreement, "{:.2%}", "positions where both choose the same token"),
        ("Mean KL divergence", kl, "{:.2e}", "nats between the distributions; 0 is equal"),
        ("Perplexity ratio", ratio, "{:.5f}", "candidate / reference; 1 is equal"),
        ("Largest logit change", largest, "{:.2e}", "of any token at any position"),
    )
    return element("ul", *(_card(*card) for card in cards), class_="cards")


def _card(name: str, metric: Metric, form: str, text: str) -> Markup:
    value = "–" if metric.value is None else form.format(metric.value)
    ends = ""
    if metric.low is not None and metric.high is not None:
        ends = f"95 %: {form.format(metric.low)} … {form.format(metric.high)}"
    return element(
        "li",
        element("span", name, class_="name"),
        element("b", value),
        joined(*(element("span", line) for line in (ends, text) if line)),
    )
