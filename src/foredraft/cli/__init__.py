"""The command line: one module a command, put together in :mod:`foredraft.cli.main`."""

from foredraft.cli.main import app, main

__all__ = ["app", "main"]
