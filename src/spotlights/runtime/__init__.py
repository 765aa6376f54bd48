"""What every method shares, and nothing that a single method needs."""
