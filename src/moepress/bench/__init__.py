"""Measurements: one file a benchmark. Each runs the reference and ours side by side and writes what it found."""
