"""Who may import what, read from the sources: also what is imported only inside a function."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "headport"
ROOMS = ("export", "quantize", "runtime", "validate")
GRAPH_CODE = ("headport.graphs", "headport.lowering")


@dataclass(frozen=True)
class Rule:
    """What the modules whose name starts with `place` may import, besides the standard library."""

    place: str
    packages: frozenset[str]
    headport: tuple[str, ...]  # prefixes of our own modules
    but_not: tuple[str, ...] = ()


def rule(place: str, packages: str, headport: str, but_not: tuple[str, ...] = ()) -> Rule:
    return Rule(place, frozenset(packages.split()), tuple(headport.split()), but_not)


BASE = "numpy msgspec safetensors tqdm"
ROOM_NAMES = tuple(f"headport.{room}" for room in ROOMS)
# The first rule whose place fits a module holds for it.
RULES = (
    rule("headport.session", f"{BASE} onnxruntime", "headport", ROOM_NAMES + GRAPH_CODE),
    rule("headport.graphs", f"{BASE} onnx_ir", "headport", ROOM_NAMES),
    rule("headport.lowering", f"{BASE} onnx_ir", "headport", ROOM_NAMES),
    rule("headport.merge", f"{BASE} onnx_ir", "headport", ROOM_NAMES),
    rule(  # ranges are measured on texts, which are tokenised as the runtime does it
        "headport.lint",
        f"{BASE} onnx_ir",
        "headport",
        ("headport.export", "headport.quantize", "headport.validate"),
    ),
    rule(
        "headport.export",
        f"{BASE} torch transformers onnx onnx_ir onnxscript tokenizers gguf accelerate",
        "headport",
        ("headport.quantize", "headport.runtime", "headport.validate"),
    ),
    rule(  # texts are tokenised as the runtime does it
        "headport.quantize.states",
        BASE,
        "headport",
        ("headport.export", "headport.validate", *GRAPH_CODE),
    ),
    rule(  # needs no graph, only a tokenizer
        "headport.quantize.count",
        f"{BASE} tokenizers pyarrow",
        "headport",
        ("headport.export", "headport.runtime", "headport.validate", *GRAPH_CODE),
    ),
    rule(  # chat templates are rendered as the runtime does it
        "headport.quantize.prune",
        f"{BASE} onnx_ir tokenizers jinja2",
        "headport",
        ("headport.export", "headport.validate"),
    ),
    rule(
        "headport.quantize",
        f"{BASE} onnx_ir ml_dtypes",
        "headport",
        ("headport.export", "headport.runtime", "headport.validate"),
    ),
    rule(  # it lowers and merges what it builds plans of; backends are imported by name
        "headport.runtime.engine",
        BASE,
        "headport",
        ("headport.export", "headport.quantize", "headport.validate"),
    ),
    rule(
        "headport.runtime.serve",
        f"{BASE} fastapi starlette uvicorn",  # fastapi hands on some of what starlette raises only
        "headport",
        ("headport.export", "headport.quantize", "headport.validate", *GRAPH_CODE),
    ),
    rule(
        "headport.runtime",
        f"{BASE} tokenizers jinja2",
        "headport",
        ("headport.export", "headport.quantize", "headport.validate", *GRAPH_CODE),
    ),
    rule("headport.validate.boundaries", f"{BASE} onnx_ir", "headport"),  # copies of graphs
    rule("headport.validate.pytest_plugin", "pytest", "headport"),
    rule("headport.validate.harness_model", f"{BASE} lm_eval", "headport"),
    rule("headport.validate", f"{BASE} torch transformers tokenizers", "headport"),
    rule("headport", BASE, "headport", ROOM_NAMES),
)

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript")
NO_GRAPHS = (
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "headport.graphs",
    "headport.lowering",
    "headport.runner",
    "headport.session",
    "headport.runtime",
    "headport.quantize",
)
# module → what neither it nor anything of ours that it imports may import
CHAINS = {
    "headport.runtime": (*HEAVY, "fastapi", "starlette", "uvicorn"),
    "headport.runtime.command": (*HEAVY, "fastapi", "starlette", "uvicorn"),
    "headport.runtime.serve.app": HEAVY,
    "headport.cli": (*HEAVY, "onnxruntime"),
    "headport.export.checkpoint": ("onnx", "onnx_ir", "onnxscript", "onnxruntime"),
    "headport.validate.reference": NO_GRAPHS,
    "headport.validate.heads.reference": NO_GRAPHS,
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files() -> Iterator[Path]:
    # The rooms are links, and rglob does not follow links.
    yield from SOURCE.glob("*.py")
    for folder in SOURCE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            yield from (SOURCE / folder.name / p.relative_to(folder) for p in folder.rglob("*.py"))


MODULES = {module_name(path): path for path in python_files()}


def imports(tree: ast.AST, *, at_once: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import; `from a import b` counts as a.b where that exists.

    With `at_once` only of those that run when the module is imported.
    """
    for node in ast.iter_child_nodes(tree):
        if at_once and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else node.module), node.lineno
        else:
            yield from imports(node, at_once=at_once)


def within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def faults(module: str, tree: ast.AST) -> list[str]:
    rule = next(r for r in RULES if within(module, [r.place]))
    found = []
    for name, line in imports(tree):
        top = name.split(".")[0]
        if top == "headport":
            own = within(name, [rule.place]) if rule.place != "headport" else False
            allowed = own or (within(name, rule.headport) and not within(name, rule.but_not))
        else:
            allowed = top in sys.stdlib_module_names or top in rule.packages
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


def homes(module: str) -> set[str]:
    """The modules that a lazy `__init__` names in strings."""
    constants = (n.value for n in ast.walk(parse(module)) if isinstance(n, ast.Constant))
    return {c for c in constants if c in MODULES}


def closure(module: str) -> dict[str, str]:
    """Everything a module imports, through our own modules: name → the module that does it."""
    reached: dict[str, str] = {}
    waiting = [(module, False)]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        name, passing = current
        # Importing a.b.c runs a and a.b first, but uses none of their lazy names.
        parts = name.split(".")
        waiting += [(".".join(parts[:n]), True) for n in range(1, len(parts))]
        found = {n for n, _ in imports(parse(name), at_once=passing)}
        if MODULES[name].stem == "__init__" and not passing:
            found |= homes(name)
        for other in found:
            reached.setdefault(other, name)
            if other in MODULES:
                waiting.append((other, False))
    return reached


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_what_its_room_may(module):
    assert not faults(module, parse(module))


@pytest.mark.parametrize("module", sorted(CHAINS))
def test_nothing_forbidden_is_reached_through_others(module):
    reached = closure(module)
    assert not {n: by for n, by in reached.items() if within(n, CHAINS[module])}


def test_the_reference_process_uses_what_loads_a_model_only():
    reached = closure("headport.validate.reference")
    used = {n for n in reached if within(n, ["headport.export"])}
    # An adapter is a part of the checkpoint.
    used = {n for n in used if not within(n, ["headport.export.tuning"])}
    loading = {f"headport.export.{name}" for name in ("checkpoint", "source", "own_model")}
    assert used <= {"headport.export", *loading}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_start_light(room):
    allowed = {f"headport.{room}"} if room == "runtime" else set()
    for name, _ in imports(parse(f"headport.{room}"), at_once=True):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or within(name, allowed)


def test_no_relative_imports_and_no_room_by_its_folder_name():
    for path in [*MODULES.values(), *Path(__file__).parent.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                assert (node.module or "").split(".")[0] not in ROOMS, f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                tops = {alias.name.split(".")[0] for alias in node.names}
                assert not tops & set(ROOMS), f"{path}:{node.lineno}"


def test_no_import_cycles():
    graph = {
        module: {name for name, _ in imports(parse(module)) if name in MODULES} - {module}
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("headport.runtime.sampling.sampler", "import torch"),
        ("headport.runtime.sampling.sampler", "import fastapi"),
        ("headport.runtime.sampling.sampler", "def f():\n    from onnx_ir import Model"),
        ("headport.runtime.sampling.sampler", "from headport.graphs import load_graphs"),
        ("headport.runtime.sampling.sampler", "from headport import lowering"),
        ("headport.quantize.blocks", "import torch"),
        ("headport.quantize.blocks", "from headport.export import checkpoint"),
        ("headport.export.trace", "import onnxruntime"),
        ("headport.bundle", "import onnx_ir"),
        ("headport.bundle", "from headport.runtime import Generator"),
        ("headport.runner", "import onnxruntime"),
        ("headport.lowering.match", "import headport.runtime.text"),
        ("headport.merge.genai", "from headport.runtime import Generator"),
        ("headport.validate.gates", "import pandas"),
    ],
)
def test_the_rules_find_what_they_forbid(module, line):
    assert faults(module, ast.parse(line))


def test_chains_are_followed():
    assert "onnx_ir" in closure("headport.quantize")  # through a lazy name
    assert "torch" in closure("headport.export")  # through a name in a string
    assert "onnxruntime" in closure("headport.runtime")  # inside a function of another module
    assert "onnx_ir" not in closure("headport.validate.reference")
