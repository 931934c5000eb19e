"""The command line: one table of verbs, used by help and dispatch alike."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headport import __version__
from headport.bundle import check_writable, write_text
from headport.command import Outcome, add_arguments, options_from_namespace
from headport.errors import HeadportError
from headport.progress import set_quiet

__all__ = ["main"]

# verb → (module, one sentence); a verb's module is imported only when it is called, because
# rooms need packages that a runtime-only installation does not have.
COMMANDS: dict[str, tuple[str, str]] = {
    "export": ("headport.export.command", "Export a checkpoint to a portable bundle."),
    "quantize": ("headport.quantize.command", "Quantise the head of a portable bundle."),
    "mix": ("headport.quantize.mix.command", "Choose by measurement which matrices may be INT4."),
    "sweep": ("headport.quantize.sweep", "Try recipes for a head; show what each costs and loses."),
    "count": ("headport.quantize.count.command", "Count how often a corpus uses each token."),
    "prune": ("headport.quantize.prune.command", "Keep the tokens that a domain uses."),
    "domain": ("headport.quantize.domain", "Save a domain's tokens in a bundle, by name."),
    "lower": ("headport.lowering.command", "Lower a portable bundle to one target."),
    "tune": ("headport.runtime.tuning.command", "Choose threads by measuring; record them."),
    "lint": ("headport.lint.command", "Say what a target refuses, widens or ignores in a bundle."),
    "engine": ("headport.runtime.engine.command", "Build TensorRT plans of a bundle's graphs."),
    "merge": ("headport.merge.command", "Merge a bundle into one model.onnx for other runtimes."),
    "build": ("headport.build", "Run the stages of a recipe, from a checkpoint to plans."),
    "reference": ("headport.validate.recording", "Store a reference for validation without torch."),
    "validate": ("headport.validate.command", "Compare a bundle with its PyTorch reference."),
    "validate-heads": ("headport.validate.heads.command", "Compare other heads with PyTorch."),
    "price": ("headport.validate.price.command", "Say what a smaller vocabulary costs."),
    "report": ("headport.validate.reporting", "Write a report as HTML, Markdown or JUnit XML."),
    "compare": ("headport.validate.comparing", "Hold two reports on the same texts together."),
    "analyse": ("headport.validate.analysis.command", "Show terms, ends, loops, certainty."),
    "gpu-check": ("headport.validate.gpu.command", "Check on a GPU what only a GPU can show."),
    "generate": ("headport.runtime.command", "Generate text from a bundle, streaming."),
    "heads": ("headport.runtime.heads_command", "Say what a bundle's heads answer about texts."),
    "serve": ("headport.runtime.serve.command", "Serve a bundle over HTTP, as the OpenAI API."),
    "triton": ("headport.runtime.triton.command", "Write a bundle as models for NVIDIA's Triton."),
    "inspect": ("headport.inspection", "Say what a bundle is and whether it is intact."),
    "doctor": ("headport.doctor", "Check the installation of this machine."),
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns 0 passed, 1 a gate or parity failed, 2 wrong use."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    verb = next((a for a in arguments if not a.startswith("-")), None)
    if verb is not None and verb not in COMMANDS:
        parser.error(f"unknown verb {verb!r}; verbs are {', '.join(COMMANDS)}")
    try:
        if verb is not None:
            module = importlib.import_module(COMMANDS[verb][0])
            _add_verb(parser, verb, module)
        found = parser.parse_args(arguments)
        set_quiet(found.quiet, json_on_stdout=found.json == "-")
        if found.json not in (None, "-"):
            check_writable(Path(found.json))
        with _ended_by_signal():
            outcome = module.run(options_from_namespace(module.Options, found))
        _deliver(outcome, found)
        return int(outcome.exit_code)
    except HeadportError as error:
        print(f"headport: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        return _missing_package(error, verb)
    except KeyboardInterrupt:
        print("headport: interrupted; no output was written", file=sys.stderr)
        return 130
    except _Terminated:
        print("headport: ended by SIGTERM; no output was written", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # the reader of our stdout has gone, as in `headport … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # the machine's fault, not ours: full disk, no permission
        where = f"{error.filename}: " if error.filename else ""
        print(f"headport: {where}{error.strerror or error}", file=sys.stderr)
        return 2


class _Terminated(BaseException):
    """SIGTERM as an exception, so that drafts are removed as after Ctrl-C."""


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headport",
        description="Language-model heads: exported, quantised, run, and proved.",
        epilog=f"verbs:\n{verbs}\n\n`headport VERB --help` lists a verb's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headport {__version__}")
    parser.set_defaults(quiet=False, json=None)
    parser.usage = "headport [--version] VERB [options]"
    return parser


def _add_verb(parser: argparse.ArgumentParser, verb: str, module: Any) -> None:
    parser.usage = None
    verbs = parser.add_subparsers(dest="verb", required=True)
    child = verbs.add_parser(verb, description=module.SUMMARY, allow_abbrev=False)
    add_arguments(child, module.Options)
    child.add_argument("--quiet", action="store_true", help="no progress, no text on stdout")
    child.add_argument("--json", metavar="FILE", help="write the result as JSON (- for stdout)")


def _deliver(outcome: Outcome, found: argparse.Namespace) -> None:
    if found.json is not None:
        document = msgspec.json.format(msgspec.json.encode(outcome.document), indent=2).decode()
        if found.json == "-":
            print(document)
        else:
            write_text({Path(found.json): document + "\n"}, force=True)
    if found.json != "-" and not found.quiet and outcome.text:
        print(outcome.text)


# package → the extra that brings it; all others come with `export`
_EXTRAS = {
    "onnxruntime": "cpu",
    "tokenizers": "cpu",
    "jinja2": "cpu",
    "fastapi": "serve",
    "uvicorn": "serve",
}


def _missing_package(error: ModuleNotFoundError, verb: str | None) -> int:
    name = (error.name or "").split(".")[0]
    if name in ("", "headport"):
        raise error
    extra = _EXTRAS.get(name, "export")
    print(
        f"headport: {verb} needs the package {name!r}, which is not installed; "
        f"pip install 'headport[{extra}]'",
        file=sys.stderr,
    )
    return 2
