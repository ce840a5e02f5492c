"""The figures of this machine that the planner needs: measured once, then read from the cache."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import fields
from pathlib import Path

import torch

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError
from vllm_subspec.files import alone, atomic_replace, private_directory, read_private
from vllm_subspec.memory import release_freed_memory
from vllm_subspec.plan import MachineFigures
from vllm_subspec.shadow import kernel_status
from vllm_subspec.shadow.probe import call_s, draft_rates, target_flops_per_s
from vllm_subspec.stream.probe import streaming

# Python, norms, rotary embedding and attention of a layer, which no short probe can tell, in calls
# of an op that does next to nothing: taken once from the engine's counters, on 2 cores where such a
# call takes 2.8 us (4 wide steps of 135M and 1.04B: 0.22 and 0.27 ms a layer; passes of 60 rows).
STEP_OVERHEAD_CALLS_PER_LAYER = 85
PASS_OVERHEAD_CALLS_PER_LAYER = 290


def load_or_measure(directory: Path, dtype: torch.dtype) -> MachineFigures:
    """Figures from the cache, or measured and cached (about 4 s, 512 MiB of disk).

    Of several processes one measures, alone, and the others take its figures: replicas that start
    together come to the same plan, and so share their spill.

    Args:
        directory: where spills lie; created, private, where it is missing.
        dtype: of the target.

    Raises:
        ConfigError: the cached figures are damaged, or not this user's.
        SpillError: the disk cannot be written or read.
        OSError: a directory cannot be made private.
    """
    path = _cache_file(private_directory(directory), dtype)
    with alone(path.parent):
        return _read(path) if path.exists() else measure_anew(directory, dtype)


def measure_anew(directory: Path, dtype: torch.dtype) -> MachineFigures:
    """The same, measured now whatever the cache holds: a disk's speed drifts.

    Later calls of ``load_or_measure`` find these figures. Errors are the same.
    """
    folder = private_directory(directory)
    figures = measure_machine(folder, dtype)
    with atomic_replace(_cache_file(folder, dtype)) as temporary:
        temporary.write_text(json.dumps(figures.to_json(), indent=2) + "\n", encoding="utf-8")
    return figures


def measure_machine(directory: Path, dtype: torch.dtype) -> MachineFigures:
    """Measure, on as many threads as torch has now; nothing else should run meanwhile.

    Raises:
        SpillError: the disk cannot be written or read.
    """
    draft, call = draft_rates(), call_s()
    release_freed_memory()
    # Targets compute while the link is busy, which takes cores and memory from them; drafts find
    # the slots full most of the time.
    with streaming(directory) as link_bytes_per_s:
        target = target_flops_per_s(dtype)
    release_freed_memory()
    return MachineFigures(
        link_bytes_per_s=link_bytes_per_s,
        draft_bytes_per_s=draft.bytes_per_s,
        target_flops_per_s=target,
        step_overhead_s_per_layer=STEP_OVERHEAD_CALLS_PER_LAYER * call,
        pass_overhead_s_per_layer=PASS_OVERHEAD_CALLS_PER_LAYER * call,
        draft_flops_per_s=draft.flops_per_s,
    )


def _cache_file(folder: Path, dtype: torch.dtype) -> Path:
    return private_directory(envs.cache_dir()) / f"machine-{_digest(folder, dtype)}.json"


def _read(path: Path) -> MachineFigures:
    try:
        return MachineFigures.from_json(json.loads(read_private(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): delete it to have this machine measured again"
        ) from error


def _digest(directory: Path, dtype: torch.dtype) -> str:
    """Of all that the figures depend on, and of which figures there are."""
    parts = (
        _processor(),
        torch.get_num_threads(),
        dtype,
        directory.stat().st_dev,
        torch.__version__,
        kernel_status(),
        [field.name for field in fields(MachineFigures)],
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()
