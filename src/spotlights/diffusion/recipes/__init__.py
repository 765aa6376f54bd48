"""Training, judging and sampling denoisers of token sequences."""
