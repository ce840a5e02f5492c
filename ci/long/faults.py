"""Break the disk under a running server, as a client sees it: right tokens or an error, no hang.

Greedy, FP32: every answer that comes must equal the first one, token for token. Exit status 1: one
did not, a request hung, or a server did not start again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from vllm_subspec.tools.serving import (
    Server,
    free_port,
    interrupt_on_termination,
    running,
    vllm_serve,
)

PROMPT = "The water cycle begins when"
TOKENS, LONG = 48, 400
HANG_S = 90.0  # beyond the 60 s that a read may take
FAULT_AFTER_S = 1.5  # into a long answer


def start(model: Path, spills: Path, log: Path) -> AbstractContextManager[Server]:
    port = free_port()
    subspec = {"method": "subspec", "stream": "disk", "stream_dir": str(spills)}
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2"]
    options += ["--speculative-config", json.dumps(subspec), "--served-model-name", "m"]
    return running(vllm_serve(model, port, options), port, log)


def ask(server: Server, tokens: int) -> tuple[int, str]:
    """HTTP status, and the answer's text or the error's."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=HANG_S) as client:
        answer = client.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True})
    good = answer.status_code == 200
    return answer.status_code, answer.json()["choices"][0]["text"] if good else answer.text


def spill_of(spills: Path) -> Path:
    return next(path for path in spills.iterdir() if path.suffix == ".spill")


def remove(spill: Path) -> None:
    spill.unlink()


def cut(spill: Path) -> None:
    os.truncate(spill, spill.stat().st_size // 2)


def overwrite(spill: Path) -> None:
    with spill.open("r+b") as file:
        for offset in range(0, spill.stat().st_size, 1 << 20):
            file.seek(offset)
            file.write(b"\x55" * 4096)


def broken_by(
    fault: Callable[[Path], None], server: Server, spills: Path, whole: str
) -> tuple[bool, str]:
    """Whether a long answer that is under way is right or an error, in time; and what came."""
    found: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: found.append(ask(server, LONG)), daemon=True)
    asking.start()
    time.sleep(FAULT_AFTER_S)
    began = time.monotonic()
    fault(spill_of(spills))
    asking.join(HANG_S)
    seconds = time.monotonic() - began
    if not found:
        return False, f"no answer within {seconds:.0f} s"
    status, text = found[0]
    if status == 200:
        return (
            text == whole,
            f"answered after {seconds:.1f} s, {'right' if text == whole else 'WRONG'}",
        )
    return status >= 500, f"HTTP {status} after {seconds:.1f} s: {text[:90]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, small")
    model = parser.parse_args().model
    interrupt_on_termination()
    held = True
    with tempfile.TemporaryDirectory() as folder:
        spills, log = Path(folder) / "spills", Path(folder) / "server.log"
        spills.mkdir(mode=0o700)
        with start(model, spills, log) as server:
            first, whole = ask(server, TOKENS), ask(server, LONG)
            assert first[0] == whole[0] == 200, (first, whole)
        for fault in (remove, cut, overwrite):
            with start(model, spills, log) as server:
                again = ask(server, TOKENS) == first
                good, what = broken_by(fault, server, spills, whole[1])
            print(f"{fault.__name__}: {what}; right before it: {again}", flush=True)
            held &= again and good
        with start(model, spills, log) as server:
            again = ask(server, TOKENS) == first
        print(f"started again, right: {again}", flush=True)
    return 0 if held and again else 1


if __name__ == "__main__":
    raise SystemExit(main())
