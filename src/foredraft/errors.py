"""The exceptions.

ForedraftError
├── InvalidOptionError (ValueError)     an option or argument: value, limit and remedy
├── ModelLoadError (ValueError)         a model that cannot be found, read or trusted
├── UnsupportedModelError (ValueError)  a model or feature refused by name
├── IncompatibleDrafterError (ValueError)  drafter and target do not fit; both are named
└── RequestError (ValueError)           one request is refused; the engine goes on
"""

from __future__ import annotations


class ForedraftError(Exception):
    """Base of all errors of this package."""


class InvalidOptionError(ForedraftError, ValueError):
    """An option has a value that cannot be used."""


class ModelLoadError(ForedraftError, ValueError):
    """A model cannot be found, read or trusted."""


class UnsupportedModelError(ForedraftError, ValueError):
    """A model asks for something that this engine does not do."""


class IncompatibleDrafterError(ForedraftError, ValueError):
    """The drafter does not fit the target."""


class RequestError(ForedraftError, ValueError):
    """A request that cannot be served."""
