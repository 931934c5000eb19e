"""Running the bundle of an encoder: whole texts in, the hidden state of every token out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import SOURCE_IDS, SOURCE_MASK
from headport.errors import BundleError, PromptError
from headport.heads import HeadMethods, HeadSessions
from headport.manifest import Manifest
from headport.session import SessionSettings, open_session
from headport.tuned import settings_of

__all__ = ["EncoderRunner", "is_encoder"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def is_encoder(manifest: Manifest) -> bool:
    """Whether the bundle reads texts and continues none: an encoder without a decoder."""
    roles = {graph.role for graph in manifest.graphs.values()}
    return "encoder" in roles and "backbone" not in roles


class EncoderRunner(HeadMethods):
    """Runs an encoder and its heads. `runs` counts runs of the encoder.

    The encoder's graph takes source_ids and source_mask, int64 [source_batch, source], and gives
    hidden_states [source_batch, source, H]. It keeps nothing between runs.

    Args:
        bundle: Of an encoder.
        settings: How to open it.
        heads: Heads to open; None for all.

    Raises:
        BundleError: If the bundle holds no encoder, or a graph does not load.
        UsageError: If the provider does not work on this machine.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: SessionSettings | None = None,
        heads: tuple[str, ...] | None = None,
    ) -> None:
        manifest = bundle.manifest
        if not is_encoder(manifest):
            raise BundleError(
                f"{bundle.path}: the bundle of an encoder was expected, its graphs are "
                f"{', '.join(manifest.graphs)}"
            )
        resolved = settings_of(manifest, settings)
        graph = next(g for g in manifest.graphs.values() if g.role == "encoder")
        self.runs = 0
        self._max_tokens = manifest.model.max_context
        self._encoder = open_session(bundle.path / graph.file, manifest.session_options, resolved)
        self._heads = HeadSessions(bundle, resolved, heads)

    def cpu_operators(self) -> dict[str, int]:
        """As `headport.runner.Runner.cpu_operators`."""
        return dict(Counter(self._encoder.cpu_operators) + Counter(self._heads.cpu_operators()))

    def encode(self, token_ids: Int64, lengths: Int64) -> Float32:
        """Hidden states of whole texts.

        Args:
            token_ids: [B, T], each row's tokens first, anything after them.
            lengths: [B], tokens per row, from 1 to T.

        Returns:
            [B, T, H]; entries past a row's length are unspecified.

        Raises:
            PromptError: If a row is empty, or longer than the model can read.
        """
        batch, width = token_ids.shape
        assert lengths.shape == (batch,) and lengths.max(initial=0) <= width
        if lengths.min(initial=1) < 1 or lengths.max(initial=1) > self._max_tokens:
            raise PromptError(
                f"texts of 1 to {self._max_tokens} tokens were expected, "
                f"{lengths.tolist()} were given"
            )
        valid = np.arange(width)[None, :] < lengths[:, None]
        feeds = {
            SOURCE_IDS: np.where(valid, token_ids, 0),
            SOURCE_MASK: valid.astype(np.int64),
        }
        found = self._encoder.run(feeds, ("hidden_states",))
        self.runs += 1
        return found["hidden_states"].astype(np.float32, copy=False)
