"""Examples that are run by tests or by make targets."""
