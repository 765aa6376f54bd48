"""Training recipes for WBMM networks."""
