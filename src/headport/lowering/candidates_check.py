"""What a lowered head says of its candidates, against what follows from its own other outputs.

A head that ranks candidates in one node of headport's own gives, besides them, the bounds it picked
them by and the quantised logits. From these and the original weight everything else follows:

    candidates   the M largest of upper + noise, equal ones by id; cut = the next one
    logits       z = softcap(scale · (W[id]·x + b[id])) in float64, within `error`
    error        2 (H + 16) u' · scale · (‖x‖ max‖W_v‖ + max|b|) + softcap · 2⁻⁴⁶,  u' = 2⁻⁵³
    certified_k  leading logits above cut, and above each other, by more than `error`
    logsumexp    ln(Σ exp z of candidates + Σ exp q of all others)

docs/exact-head.md derives them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import SELFTEST_FILE, Bundle
from headport.certificate import LARGEST_NORM
from headport.errors import ParityError
from headport.heads import Candidates, HeadSessions
from headport.kernels import CANDIDATES, DOMAIN
from headport.ledger import find_tensor, read_tensor
from headport.manifest import Head
from headport.session import SessionSettings

__all__ = ["CandidatesCheck", "check_candidates"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

_ACCEPTED = 1e-5  # of logsumexp, whose terms are float32
_NOISE = 3.0  # logits, so that other tokens are picked
_SIZES = (1e-3, 1.0, 1.0, 30.0, 1e18)  # of random hidden states; the last is above LARGEST_NORM
# As in `headport.quantize.candidates_pass`, written once more: this is what checks it.
_UNIT = 2.0**-53
_TANH_ERROR = 2.0**-46
_LEAST_ERROR = 2.0**-900


@dataclass(frozen=True)
class CandidatesCheck:
    """What was compared; any difference is an error."""

    rows: int
    candidates: int  # of each row
    certified: int  # ranks that were proved, of all rows


def check_candidates(
    portable: Bundle, bundle: Bundle, settings: SessionSettings
) -> dict[str, CandidatesCheck]:
    """Check every head of a written bundle that ranks candidates in a node of its own, by name.

    Args:
        portable: What it was made from; holds the original weights.
        bundle: Lowered, with its self-test, whose hidden states are taken beside random ones.
        settings: How it runs.

    Raises:
        ParityError: If something differs, naming what.
    """
    found = {}
    for name, head in bundle.manifest.heads.items():
        graph = ir.load(bundle.path / bundle.manifest.graphs[head.graph].file).graph
        if not any((node.domain, node.op_type) == (DOMAIN, CANDIDATES) for node in graph):
            continue
        sessions = HeadSessions(bundle, settings, (name,))
        states = _hidden_states(bundle)
        q = sessions.quantised(states, name)
        rows = _Rows(portable, head, sessions.states(states, name), q.logits)
        rng = np.random.Generator(np.random.Philox(key=23))
        noise = rng.normal(0, _NOISE, q.logits.shape).astype(np.float32)
        certified = 0
        for given in (None, noise):
            candidates = sessions.head(states, name, given).candidates
            assert candidates is not None
            certified += int(candidates.certified_k.sum())  # with noise it is 0
            keys = q.upper_bounds if given is None else q.upper_bounds + given
            for what, holds in rows.checks(candidates, keys, ranked=given is None).items():
                if not holds.all():
                    raise ParityError(
                        f"the lowered head {name}: {what} of {int((~holds).sum())} of "
                        f"{len(states)} hidden states {'with noise ' if given is not None else ''}"
                        "do not follow from its bounds and its original weight; nothing was written"
                    )
        assert head.candidates is not None
        found[name] = CandidatesCheck(len(states), head.candidates.count, certified)
    return found


def _hidden_states(bundle: Bundle) -> Float32:
    from safetensors.numpy import load_file

    stored = load_file(bundle.path / SELFTEST_FILE)["hidden_states"].astype(np.float32)
    rng = np.random.Generator(np.random.Philox(key=22))
    random = rng.normal(size=(len(_SIZES), stored.shape[1])) * np.array(_SIZES)[:, None]
    return np.concatenate([stored, random.astype(np.float32)])


class _Rows:
    """What is known of some hidden states without asking how a head ranks."""

    def __init__(self, portable: Bundle, head: Head, states: Float32, logits: Float32) -> None:
        manifest, form = portable.manifest, head.candidates
        assert form is not None
        self._head, self._form, self._logits = head, form, logits.astype(np.float64)
        self._x = states.astype(np.float64)
        [entry] = [  # other heads may have a weight of this name
            tensor
            for tensor in manifest.tensors
            if tensor.name == form.original
            and any(c.startswith(f"{form.full}:") for c in tensor.consumers)
        ]
        self._weight = read_tensor(portable, entry)
        self._largest = float(np.linalg.norm(self._weight.astype(np.float64), axis=1).max())
        self._bias = np.zeros(len(self._weight), np.float32)
        if head.bias:
            self._bias = read_tensor(portable, find_tensor(manifest, head.graph, "candidates.bias"))

    def checks(self, found: Candidates, keys: Float32, *, ranked: bool) -> dict[str, Bool]:
        """What must hold of each row, by its name."""
        order = np.argsort(-keys, axis=1, kind="stable")
        M, certified = self._form.count, self._form.certified
        norms = np.linalg.norm(self._x, axis=1)
        cut = np.take_along_axis(keys, order[:, M : M + 1], axis=1)[:, 0].astype(np.float64)
        cut = np.where(certified & (norms < LARGEST_NORM), cut, np.inf)
        step, ahead = np.diff(found.logits, axis=1), np.diff(found.ids, axis=1) > 0
        error, limit = found.error[:, None], self._error(norms, self._largest)
        stated = limit if certified else self._error(norms, 0.0)  # of what proves nothing, no norms
        exact = self._exact(found)
        equal = self._equal_rows(found)
        proved = found.logits - error > cut[:, None]
        proved[:, :-1] &= (-step > 2 * error) | equal
        count = np.where(proved.all(axis=1), M, (~proved).argmax(axis=1)) if certified else 0
        mass = self._mass(found)
        return {
            "candidates": (np.sort(found.ids, axis=1) == np.sort(order[:, :M], axis=1)).all(axis=1),
            "cut": found.cut == cut,
            "error": np.isclose(found.error, stated, rtol=1e-9, atol=0),
            "candidates' logits": (np.abs(found.logits - exact) <= limit[:, None]).all(axis=1),
            "candidates' order": ((step < 0) | (step == 0) & ahead).all(axis=1),
            "logsumexp": np.abs(found.logsumexp - mass) <= _ACCEPTED * np.maximum(1, np.abs(mass)),
        } | ({"proved ranks": found.certified_k == count} if ranked else {})

    def _exact(self, found: Candidates) -> Float64:
        rows = self._weight[found.ids].astype(np.float64)
        z = np.einsum("nmh,nh->nm", rows, self._x) + self._bias[found.ids].astype(np.float64)
        z *= self._head.scale
        cap = self._head.softcap
        mapped: Float64 = z if cap is None else np.tanh(z / cap) * cap
        return mapped

    def _error(self, norms: Float64, largest: float) -> Float64:
        steps = 2 * (self._x.shape[1] + 16) * _UNIT * self._head.scale
        rest = (self._head.softcap or 0.0) * _TANH_ERROR + _LEAST_ERROR
        error: Float64 = steps * (norms * largest + float(np.abs(self._bias).max())) + rest
        return error

    def _equal_rows(self, found: Candidates) -> Bool:
        """Whether each candidate's row, and bias, is that of the next, bit for bit."""
        rows = np.ascontiguousarray(self._weight[found.ids]).view(np.uint32)
        bias = self._bias[found.ids].view(np.uint32)
        same: Bool = (rows[:, 1:] == rows[:, :-1]).all(axis=2) & (bias[:, 1:] == bias[:, :-1])
        return same

    def _mass(self, found: Candidates) -> Float64:
        z = self._logits.copy()
        np.put_along_axis(z, found.ids, found.logits, axis=1)
        most = z.max(axis=1, keepdims=True)
        mass: Float64 = np.log(np.exp(z - most).sum(axis=1)) + most[:, 0]
        return mass
