"""`manifest.json`: what a bundle is, whence it comes, and all that can change its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headport.errors import BundleError

__all__ = [
    "MOST_CPUS",
    "SCHEMA_VERSION",
    "AdaptiveHead",
    "BackboneQuantization",
    "CandidateForm",
    "FileEntry",
    "Graph",
    "Head",
    "License",
    "Manifest",
    "Model",
    "Port",
    "Prefix",
    "Provenance",
    "Quantization",
    "SelftestTolerance",
    "Source",
    "Stage",
    "StoredMatrix",
    "Task",
    "TaskHead",
    "TasksHead",
    "Tensor",
    "TreeHead",
    "Tuning",
    "ValueHead",
    "Vocabulary",
    "decode_manifest",
    "encode_manifest",
]

SCHEMA_VERSION = 1


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record: immutable, named fields only, unknown fields refused."""


class Port(_Strict, frozen=True):
    """One input or output of a graph. A dimension is a number or a symbol such as `batch`."""

    name: str
    dtype: str  # ONNX element type in lower case: float, float16, int64, int32 …
    shape: tuple[int | str, ...]


class Graph(_Strict, frozen=True):
    """One `.onnx` file and its role."""

    file: str
    role: Literal["backbone", "encoder", "head"]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class Quantization(_Strict, frozen=True):
    """How a weight was rounded, and how its kernel treats activations once lowered."""

    format: Literal["fp16", "bf16", "fp8", "int8", "int8-row", "int4"]
    block: int | None  # inputs that share a scale; None where the format has no blocks
    activations: Literal["residual", "rounded", "exact", "static"]
    symmetric: bool = True  # False: each scale has a zero point
    rounding: Literal["nearest", "compensated"] = "nearest"


class StoredMatrix(_Strict, frozen=True):
    """How one matrix of the backbone is stored."""

    format: Literal["fp16", "int8", "int4"]
    block: int | None  # inputs that share a scale; None where the format has no blocks
    activations: Literal["residual", "rounded", "exact"] | None = None  # None: as the others'


class BackboneQuantization(_Strict, frozen=True):
    """Matrices of the backbone that are stored in fewer bits, by the weight's name before."""

    matrices: dict[str, StoredMatrix]
    embedding: dict[str, StoredMatrix]  # tables that are looked up by token id
    # What their kernels do to activations once lowered.
    activations: Literal["residual", "rounded", "exact"]

    def activations_of(self, matrix: StoredMatrix) -> str:
        """What one matrix's kernel does to them."""
        return matrix.activations or self.activations


class CandidateForm(_Strict, frozen=True):
    """A head that proposes candidates with a quantised weight and scores them with the original."""

    count: int  # M, candidates per row
    certified: bool  # the graph holds an error bound and proves ranks with it
    bound: Literal["row", "block"] | None  # how fine the bound is; None where there is none
    full: str  # graph that gives all logits with the original weight
    original: str  # that weight's name in the tensor ledger
    original_tied: bool  # it is the same ledger entry as the input embedding


class Head(_Strict, frozen=True, omit_defaults=True):
    """hidden_states [N, H] → outputs. Logits are `softcap(scale * (W h + b))`.

    Where there is a `transform`, that graph comes first (hidden_states [N, H] → states [N, F]) and
    h are its states. `outputs` says which form the graph gives: `logits` [N, V], or `candidates`
    (candidate_ids [N, M], candidate_logits [N, M], logsumexp [N], certified_k [N], and what
    `headport.runner.Candidates` adds); `candidates` then says more.
    """

    graph: str
    outputs: Literal["logits", "candidates"]
    vocab_size: int
    scale: float
    softcap: float | None
    bias: bool
    weight: str  # name of the head's weight in the tensor ledger
    tied: bool  # the weight is the same ledger entry as the input embedding
    quantization: Quantization | None
    candidates: CandidateForm | None = None
    transform: str | None = None  # graph that comes before it


class Task(_Strict, frozen=True):
    """One task of a head: its outputs are `head.vocab_size` scores."""

    head: Head
    labels: tuple[str, ...]  # names of the scores, in order


class ValueHead(_Strict, frozen=True, tag_field="kind", tag="value"):
    """A scalar per position; with `pooling` last, one per text, at its last token.

    The last token is the last one that is not `pad_id`, where a padding token is named.
    """

    meaning: str  # whence it comes, in words
    head: Head  # of one output
    pooling: Literal["none", "last"]
    pad_id: int | None


class TasksHead(_Strict, frozen=True, tag_field="kind", tag="tasks"):
    """Named tasks, often behind one shared layer; the task is chosen per text."""

    meaning: str
    tasks: dict[str, Task]
    pooling: Literal["none", "last"]  # as of a `ValueHead`
    pad_id: int | None


class AdaptiveHead(_Strict, frozen=True, tag_field="kind", tag="adaptive"):
    """Adaptive softmax: frequent tokens in a shortlist, the others in tail clusters.

    The shortlist gives `cutoffs[0]` tokens and one score per cluster; cluster i holds the tokens
    from `cutoffs[i]` to `cutoffs[i + 1] - 1`. Source: Grave et al. 2017, arXiv:1609.04309.
    """

    meaning: str
    shortlist: Head
    tails: tuple[Head, ...]
    cutoffs: tuple[int, ...]  # the last one is the size of the vocabulary


class TreeHead(_Strict, frozen=True, tag_field="kind", tag="tree"):
    """Softmax over classes, then over the tokens of a class.

    Row r of `members` is the token `order[r]`; class c owns the rows from `starts[c]` to
    `starts[c + 1] - 1`. Source: Goodman 2001, arXiv:cs/0108006.
    """

    meaning: str
    classes: Head
    members: Head
    starts: tuple[int, ...]
    order: str | None  # file with int32 [V]; None: rows are in the order of their tokens


TaskHead = ValueHead | TasksHead | AdaptiveHead | TreeHead


class Tensor(_Strict, frozen=True):
    """A large tensor, stored once. `consumers` are `graph:initializer` names."""

    name: str
    sha256: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int  # bytes
    length: int  # bytes
    consumers: tuple[str, ...]


class Vocabulary(_Strict, frozen=True):
    """True size V, the width of the stored matrices, and the kept size K of a pruned bundle."""

    size: int
    padded_size: int
    kept_size: int | None
    map: str | None  # file with int32 [K], new id → original id
    # File with int32 [V], id → id in the checkpoint, of a bundle whose tokenizer was rewritten.
    checkpoint_ids: str | None = None


class License(_Strict, frozen=True):
    """Licence of the weights as their checkpoint states it; `id` is None where it states none."""

    id: str | None
    source: str  # where the statement was found, or that none was
    files: tuple[str, ...]


class Stage(_Strict, frozen=True):
    """One verb that made or changed the bundle: its options, its versions, what it measured."""

    stage: str
    options: dict[str, Any]
    versions: dict[str, str]
    report: dict[str, Any]


class Provenance(_Strict, frozen=True):
    """Where the weights come from and which stages they went through, oldest first."""

    checkpoint: str  # base name only: a bundle holds no path of the machine that made it
    format: str
    sha256: str  # over the checkpoint's weight files
    stages: tuple[Stage, ...]


class Model(_Strict, frozen=True):
    """The facts a runtime needs about the network."""

    architecture: str
    hidden_size: int
    layers: int
    max_context: int  # tokens
    dtype: Literal["fp32", "fp16", "bf16"]
    query_heads: int | None = None  # None: layers differ or it is not known


class Source(_Strict, frozen=True):
    """What an encoder-decoder model reads before it answers; a decoder-only one has none.

    Token ids [S], or features [features, frames] where `vocab_size` is None.
    """

    max_length: int | None  # token ids; None: positions are relative, and no table ends
    vocab_size: int | None  # of the ids


class Prefix(_Strict, frozen=True):
    """Keys and values that every sequence begins with, in `prefix.safetensors`.

    They take the first places of the model's context: a sequence's own tokens stand at positions
    `tokens`, `tokens` + 1, …, and `model.max_context` is what is left to these.
    """

    kind: str  # of the adapter that they come from, as PEFT names it
    tokens: int  # P


MOST_CPUS = 1024  # that a record may name
_Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_CPUS)]


class Tuning(_Strict, frozen=True):
    """With how many threads a bundle answers fastest on one kind of machine, as measured there.

    Raises:
        ValueError: If that is more threads than CPUs.
    """

    cpu: Annotated[str, msgspec.Meta(min_length=1)]  # `headport.machine.cpu_model`
    cpus: _Count  # that the process could use
    instructions: tuple[str, ...]  # of the CPU, that decide which kernels ran
    onnxruntime: str  # its version
    threads: _Count
    spinning: bool  # as `headport.session.SessionSettings`

    def __post_init__(self) -> None:
        if self.threads > self.cpus:
            raise ValueError(
                f"at most as many threads as CPUs were expected, {self.threads} threads on "
                f"{self.cpus} CPUs were found"
            )


class SelftestTolerance(_Strict, frozen=True, omit_defaults=True):
    """Largest |Δ| the self-test accepts: absolute, in logits and in hidden-state units."""

    hidden_states: float
    logits: float
    task_heads: dict[str, float] = {}  # by head, in its own units


class FileEntry(_Strict, frozen=True):
    """Checksum and size of one file of the bundle."""

    sha256: str
    bytes: int


class Manifest(_Strict, frozen=True, omit_defaults=True):
    """The whole of `manifest.json`."""

    schema_version: int
    license: License
    provenance: Provenance
    model: Model
    graphs: dict[str, Graph]
    heads: dict[str, Head]
    tensors: tuple[Tensor, ...]
    vocabulary: Vocabulary
    defaults: dict[str, Any]  # generation defaults, from generation_config
    session_options: dict[str, str]
    target: Literal["portable", "ort-cpu", "ort-cuda", "tensorrt"]
    selftest: SelftestTolerance | None
    files: dict[str, FileEntry]
    backbone_quantization: BackboneQuantization | None = None
    task_heads: dict[str, TaskHead] = {}  # heads that give something else than logits of tokens
    source: Source | None = None  # of an encoder-decoder model
    prefix: Prefix | None = None  # of a model tuned by one
    tuned: tuple[Tuning, ...] = ()  # one per kind of machine

    @property
    def positions(self) -> int:
        """Tokens that a cache may hold: those of a sequence, and a learnt prefix before them."""
        return self.model.max_context + (0 if self.prefix is None else self.prefix.tokens)

    @property
    def backbone_name(self) -> str:
        """Name of the graph that turns token ids into hidden states.

        Raises:
            BundleError: If there is none.
        """
        for name, graph in self.graphs.items():
            if graph.role == "backbone":
                return name
        if any(graph.role == "encoder" for graph in self.graphs.values()):
            raise BundleError(
                "this is the bundle of an encoder: it reads whole texts and continues none, so "
                "what works token by token is not for it; use headport.runtime.Heads"
            )
        raise BundleError(
            f"the manifest's graphs are {', '.join(self.graphs) or 'none'}, one of role backbone "
            "was expected; write the bundle again"
        )

    @property
    def backbone(self) -> Graph:
        """That graph."""
        return self.graphs[self.backbone_name]


class _Version(msgspec.Struct):
    schema_version: int


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names the file in messages.

    Raises:
        BundleError: If it is not JSON, of an unknown schema version, or has missing, unknown
            or ill-typed fields.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BundleError(f"{where}: not a headport manifest ({error})") from error
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{where}: schema version {SCHEMA_VERSION} expected, {version} found; "
            "use the headport release that wrote it, or export again"
        )
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{where}: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as indented JSON, keys in declaration order, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
