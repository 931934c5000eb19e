"""What pruning a vocabulary costs and brings, and how fast a corpus is counted."""
