"""One row of logits → one token: the rules of `runtime/SAMPLING.md`, one step per file."""
