"""A slower link than the machine has, for experiments; the same one for every store."""

from __future__ import annotations

import threading
import time

from vllm_subspec.errors import ConfigError


class EmulatedLink:
    """Carries one piece after another at a fixed speed.

    Args:
        bytes_per_s: its speed.
        closing: set when nobody shall wait for it any more.

    Raises:
        ConfigError: the speed is not above 0.
    """

    def __init__(self, bytes_per_s: float, closing: threading.Event) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"emulate_bytes_per_s={bytes_per_s}: it must be above 0")
        self._bytes_per_s = bytes_per_s
        self._closing = closing
        self._lock = threading.Lock()
        self._free_at = 0.0

    def send(self, nbytes: int) -> float:
        """Queue ``nbytes`` and return when (``time.monotonic``) their last one arrives."""
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self._bytes_per_s
            return self._free_at

    def wait_until(self, arrival: float) -> None:
        """Return at ``arrival``, or as soon as the store closes."""
        self._closing.wait(arrival - time.monotonic())
