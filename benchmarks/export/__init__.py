"""What exports cost: beside peers, by stage, and in memory."""
