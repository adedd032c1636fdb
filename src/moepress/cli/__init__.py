"""The command line: one file a command."""

from moepress.cli.main import main

__all__ = ["main"]
