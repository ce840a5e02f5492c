"""Whether what a read brought is what was written: cheap where nothing changed, exact elsewhere."""

from __future__ import annotations

import logging
import mmap
import threading

import numpy as np
import torch

from vllm_subspec.errors import SpillDamagedError
from vllm_subspec.files import tensor_digest
from vllm_subspec.stream.blockfile import BlockFile
from vllm_subspec.stream.layout import SpillLayout

logger = logging.getLogger(__name__)

Stamp = tuple[int, int]
"""A file's size and change time in ns (``BlockFile.stamp``)."""

BLOCK_BYTES = 4096
"""What file systems and today's disks write, lose or misplace as a whole."""


class Integrity:
    """Proves each unit of a spill by its BLAKE3 digest once, and again when the file changed.

    A unit's proof holds while the file's stamp (size, change time) stays what it was before the
    proven read began. The stamp costs a microsecond, and the kernel moves it before any write,
    truncation or removal takes effect. So found, by the digest, is whatever went through the
    file system; a file that was only touched or removed is proven again and read on.

    What changes bytes below the file system (a disk that answers with other blocks, a write to
    the raw device) leaves the stamp alone: against that each read's block sum must be the proven
    one. It adds the first 8 bytes of every 4096. Measured over a stream of 1.5 GB/s, in shares of
    a core: 1.8 %; the first 8 bytes of every 512, 3.1 %; BLAKE3, 37 %. In cache, in GB/s: a sum
    of all bytes 29, CRC-32 5, BLAKE3 6.

    Not found: flips below the file system that miss those bytes, blocks of one unit that changed
    places, and a write within one tick of the file system's clock (some ms) after another change.
    """

    def __init__(self, file: BlockFile, layout: SpillLayout, digests: tuple[str, ...]) -> None:
        self._file = file
        self._layout = layout
        self._digests = digests
        self._proven: dict[int, Stamp] = {}
        self._sums: dict[int, int] = {}
        self._seen = file.stamp()
        self._lock = threading.Lock()

    def check(self, layer: int, content: torch.Tensor, before: Stamp) -> None:
        """See ``Spill.check``."""
        now = self._file.stamp()
        if now != self._seen:
            self._notice(now)
        if self._proven.get(layer) != now:
            self._prove(layer, tensor_digest(content), before)
            self._sums[layer] = block_sum(content)
        elif block_sum(content) != self._sums[layer]:
            raise self._damaged(layer, "the disk answered with other bytes than before")

    def check_mapped(self, index: int) -> None:
        """Prove the mapped tensor that is unit ``index``, through the page cache.

        Raises:
            OSError: the disk fails.
            SpillDamagedError: its bytes are not those that were written.
        """
        unit = self._layout.units[index]
        before = self._file.stamp()
        if unit.offset + unit.nbytes > before[0]:
            raise self._damaged(index, f"the file ends at byte {before[0]}")
        # No name for the mapping: an error's frames would keep it, and so the file, open.
        digest = tensor_digest(self._file.map(unit.offset, unit.nbytes, mmap.MADV_SEQUENTIAL))
        self._prove(index, digest, before)

    def _notice(self, now: Stamp) -> None:
        with self._lock:
            if now == self._seen:
                return
            logger.warning(
                "the spill %s was %s while in use: each layer is checked once more",
                self._file.path,
                "changed" if self._file.is_linked else "removed",
            )
            for index in range(self._layout.num_layers, len(self._layout.units)):
                if index in self._proven:  # in use
                    self.check_mapped(index)
            self._seen = now

    def _prove(self, index: int, digest: str, before: Stamp) -> None:
        if digest != self._digests[index]:
            raise self._damaged(index, "its bytes do not have the digest in the manifest")
        self._proven[index] = before

    def _damaged(self, index: int, reason: str) -> SpillDamagedError:
        unit = self._layout.units[index]
        what = f"layer {index}" if index < self._layout.num_layers else f"mapped tensor {index}"
        return SpillDamagedError(
            f"{what} of {self._file.path} is damaged ({unit.nbytes} bytes at {unit.offset}): "
            f"{reason}; load the model again"
        )


def block_sum(content: torch.Tensor) -> int:
    """The sum, modulo 2**64, of the first 8 bytes of every block of uint8 [n], n % 4096 == 0."""
    # By NumPy: a torch reduction would wake the threads that compute.
    words = content.numpy().view(np.uint64)[:: BLOCK_BYTES // 8]
    return int(words.sum(dtype=np.uint64))
