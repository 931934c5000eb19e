"""`headport heads`: what the heads of a bundle say about texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.manifest import TasksHead, ValueHead
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.runtime.heads import Heads
from headport.runtime.states import Positions, States
from headport.tuned import THREADS_HELP

__all__ = ["SUMMARY", "Options", "ask", "run"]

SUMMARY = "Say what a bundle's heads answer about texts."


class Options(OptionRecord, frozen=True):
    """Options of `headport heads`."""

    bundle: Annotated[Path, positional("the bundle's folder")]
    text: Annotated[tuple[str, ...], option("texts, read at once", flag="-t", metavar="TEXT")]
    head: Annotated[tuple[str, ...], option("heads to ask (default: all)", metavar="NAME")] = ()
    task: Annotated[
        tuple[str, ...], option("of heads with tasks: one task per text (default: all tasks)")
    ] = ()
    top: Annotated[
        int, option("most likely tokens shown, at the last token or the masked ones")
    ] = 5
    threads: Annotated[int, option(THREADS_HELP)] = 0
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False


def ask(options: Options) -> list[dict[str, Any]]:
    """Ask heads about texts; one record per text and head.

    Raises:
        HeadportError: As `Heads` and its methods.
    """
    check_least(options, {"top": 1})
    heads = Heads(
        options.bundle,
        threads=options.threads,
        provider=options.provider,
        cpu_fallback=options.cpu_fallback,
    )
    states = heads.encode(list(options.text))
    found = []
    for name in options.head or heads.names:
        answers = list(_answers(heads, states, name, options))
        found += [
            {"text": text, "head": name, **answer}
            for text, answer in zip(options.text, answers, strict=True)
        ]
    return found


def _answers(heads: Heads, states: States, name: str, options: Options) -> Iterator[dict[str, Any]]:
    entry = heads.bundle.manifest.task_heads.get(name)
    if isinstance(entry, ValueHead):
        for values in heads.values(states, name):
            yield {"values": values.tolist()}
    elif isinstance(entry, TasksHead):
        yield from _tasks(heads, states, name, options.task or list(entry.tasks), options)
    else:
        yield from _tokens(heads, states, name, options.top)


def _tasks(
    heads: Heads, states: States, name: str, tasks: Sequence[str], options: Options
) -> Iterator[dict[str, Any]]:
    asked = [list(tasks)] if options.task else [[task] * len(states) for task in tasks]
    every = [heads.tasks(states, each, name) for each in asked]
    for row in zip(*every, strict=True):
        yield {
            "tasks": {
                each.task: {
                    "labels": each.labels,
                    "scores": each.scores.tolist(),
                    "best": each.best,
                }
                for each in row
            }
        }


def _tokens(heads: Heads, states: States, name: str, count: int) -> Iterator[dict[str, Any]]:
    mask = heads.mask_id
    masked = [] if mask is None else states.where(mask)
    # A text without a masked token is asked about its last one.
    positions: Positions = [
        (masked[b] if masked else []) or [len(ids) - 1] for b, ids in enumerate(states.token_ids)
    ]
    for places, (ids, log_probs) in zip(
        positions, heads.top(states, count, name, positions), strict=True
    ):
        yield {
            "positions": list(places),
            "tokens": [[heads.spell(int(i)) for i in row] for row in ids],
            "token_ids": ids.tolist(),
            "log_probs": log_probs.tolist(),
        }


def run(options: Options) -> Outcome:
    """Ask, and print a line per text and head."""
    found = ask(options)
    return Outcome("\n".join(line for record in found for line in _lines(record)), found)


def _lines(record: dict[str, Any]) -> Iterator[str]:
    start = f"{record['text']!r}  {record['head']}"
    if "values" in record:
        yield f"{start}: {' '.join(f'{value:.4f}' for value in record['values'])}"
    for task, found in record.get("tasks", {}).items():
        yield f"{start}.{task}: {found['best']}"
    for place, tokens, log_probs in zip(
        record.get("positions", ()),
        record.get("tokens", ()),
        record.get("log_probs", ()),
        strict=True,
    ):
        listed = ", ".join(f"{t!r} {p:.3f}" for t, p in zip(tokens, log_probs, strict=True))
        yield f"{start} at {place}: {listed}"
