"""Errors that users meet. Each names the value, the reason and the fix."""

from __future__ import annotations


class SubSpecError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SubSpecError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class UnsupportedError(SubSpecError, ValueError):
    """A model, engine feature or machine that SubSpec cannot serve exactly."""


class VersionError(SubSpecError, RuntimeError):
    """vLLM is outside the range this release was tested with, or a seam of it changed."""


class DependencyError(SubSpecError, ImportError):
    """A package that the chosen settings need is missing."""


class BudgetError(SubSpecError, ValueError):
    """The memory or the slots asked for cannot hold what they must hold."""


class ShadowCacheError(SubSpecError, RuntimeError):
    """A cached shadow is damaged or belongs to other weights or settings."""


class SpillError(SubSpecError, RuntimeError):
    """The spill cannot be created, written or read (permissions, space, I/O)."""


class SpillDamagedError(SpillError):
    """A spill on disk is truncated, altered, or belongs to other weights."""
