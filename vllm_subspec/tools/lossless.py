"""The losslessness protocol: the same requests to three engines, one after another.

SubSpec is judged; SubSpec with samplers that are wrong on purpose shows that the checks can fail;
the reference tells what is right. Each engine has a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_subspec import envs
from vllm_subspec.files import private_directory
from vllm_subspec.plan import ModelShape, device_memory_bytes
from vllm_subspec.tools.bench_process import RUNTIME_ALLOWANCE_BYTES, run_job
from vllm_subspec.tools.lossless_asks import CONTROL_TOKENS, LAW_SIZE, Plan, laws_by_prefix
from vllm_subspec.tools.lossless_checks import ALPHA, Check, Results, Truth, passed, to_json
from vllm_subspec.tools.lossless_control import MUST_FAIL, WRONG_SAMPLERS
from vllm_subspec.tools.lossless_worker import Ask, Job

PLAIN_VLLM, PLAIN_STREAMING = "plain vLLM", "plain streaming"
Say = Callable[[str], None]

_WORKER = ("-m", "vllm_subspec.tools.lossless_worker")
_MAX_NUM_SEQS = 32
_BLOCKS_PER_SEQUENCE = 2
_BLOCK_TOKENS = 128  # vLLM's CPU block
_FITTING_SHARE = 0.8  # of memory: loading takes more than what stays


@dataclass(frozen=True)
class Protocol:
    """One run.

    Attributes:
        model: folder of the target.
        plan: what is asked.
        dtypes: float32, bfloat16 or both.
        options: SubSpec's.
    """

    model: Path
    plan: Plan
    dtypes: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, say: Say) -> dict[str, Any]:
        """Run everything; JSON-serialisable.

        Args:
            say: told what begins and what was found, a line each.

        Raises:
            WorkerError: an engine failed.
        """
        began = time.monotonic()
        dtypes = {dtype: self._run(dtype, say) for dtype in self.dtypes}
        return {
            "model": self.model.resolve().name,
            "passed": all(found["passed"] for found in dtypes.values()),
            "alpha": ALPHA,
            "options": dict(self.options),
            "draws_per_opening": self.plan.draws,
            "dtypes": dtypes,
            "seconds": time.monotonic() - began,
        }

    def _run(self, dtype: str, say: Say) -> dict[str, Any]:
        judged = self._ask(dtype, "subspec", self.options, self.plan.of_judged, say)
        control = self._ask(dtype, "control", self.options, self.plan.of_control, say)
        drawn = self.plan.distinct(
            [told["tokens"] for name, told in {**judged, **control}.items() if "unseeded" in name]
        )
        reference, options = self._reference(dtype)
        told = self._ask(dtype, reference, options, self.plan.of_reference(drawn), say)
        laws = laws_by_prefix(drawn, told["laws"]["laws"])
        exact = dtype == "float32"
        truth = Truth(self.model, self.plan, exact, len(self.dtypes), told, laws)
        checks = truth.checks(judged)
        controls = {
            wrong: truth.checks(
                {check: control[f"{wrong}/{check}"] for check in MUST_FAIL[wrong]}, CONTROL_TOKENS
            )
            for wrong in WRONG_SAMPLERS
        }
        _say_verdicts(dtype, checks, controls, say)
        missed = [
            f"{wrong} {check}"
            for wrong, failing in controls.items()
            for check, found in failing.items()
            if not found.found_fault
        ]
        return {
            "passed": not missed and all(passed(found) for found in checks.values()),
            "reference": reference,
            "exact": exact,
            "checks": to_json(checks),
            "controls": {
                wrong: {"meaning": WRONG_SAMPLERS[wrong], "checks": to_json(failing)}
                for wrong, failing in controls.items()
            },
            "missed": missed,
            "rounding_per_draw": truth.rounding_per_draw,
            "gaps": truth.gaps,
        }

    def _reference(self, dtype: str) -> tuple[str, Mapping[str, Any] | None]:
        """What is taken as right: SubSpec's options for it, or ``None`` for plain vLLM."""
        shape = self._shape(dtype)
        needed = shape.total_bytes + _kv_bytes(shape) + RUNTIME_ALLOWANCE_BYTES
        if needed <= _FITTING_SHARE * device_memory_bytes():
            return PLAIN_VLLM, None
        return PLAIN_STREAMING, {**self.options, "speculate": False}

    def _shape(self, dtype: str) -> ModelShape:
        return ModelShape.read(self.model, getattr(torch, dtype).itemsize)

    def _ask(
        self,
        dtype: str,
        name: str,
        options: Mapping[str, Any] | None,
        asks: Mapping[str, Ask],
        say: Say,
    ) -> Results:
        """An engine of its own for the asks; plain vLLM where ``options`` is ``None``."""
        say(f"{dtype}, {name}: {', '.join(asks)}")
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": dtype,
            "max_model_len": _BLOCKS_PER_SEQUENCE * _BLOCK_TOKENS,
            "max_num_seqs": _MAX_NUM_SEQS,
            "max_logprobs": LAW_SIZE,
            "enforce_eager": True,
            "kv_cache_memory_bytes": _kv_bytes(self._shape(dtype)),
        }
        if options is not None:
            arguments["speculative_config"] = {"method": "subspec", **options}
        job = Job(arguments, asks, options is not None)
        began = time.monotonic()
        logs = private_directory(envs.cache_dir() / "logs")
        log = logs / f"verify-{dtype}-{name.replace(' ', '-')}.log"
        told, _ = run_job(_WORKER, asdict(job), log)
        say(f"  {time.monotonic() - began:.0f} s")
        return told


def _say_verdicts(
    dtype: str, checks: Mapping[str, Check], controls: Mapping[str, Mapping[str, Check]], say: Say
) -> None:
    for name, found in checks.items():
        say(f"  {dtype}, {name}: {'passed' if passed(found) else 'FAILED'}; {found}")
    for wrong, failing in controls.items():
        caught = [name for name, found in failing.items() if found.found_fault]
        say(
            f"  {dtype}, wrong sampler {wrong!r}: caught by {len(caught)} of {len(failing)} checks "
            f"({', '.join(caught)})"
        )


def _kv_bytes(shape: ModelShape) -> int:
    """KV cache for all sequences at once, and the block that vLLM keeps for itself."""
    blocks = _MAX_NUM_SEQS * _BLOCKS_PER_SEQUENCE + 1
    return blocks * _BLOCK_TOKENS * shape.kv_bytes_per_token
