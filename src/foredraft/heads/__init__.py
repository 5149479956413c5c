"""Learned draft modules as torch modules, their checkpoint formats, and how they run behind a target."""
