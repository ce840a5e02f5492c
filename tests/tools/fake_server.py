"""A stand-in for ``vllm serve``: its routes, its child process, and its ways to fail.

    python fake_server.py PORT MODE CHILD_PID_FILE

MODE is well, dead (ends at once), mute (never answers), brittle (ends at the first question after
/health), or stubborn (ignores SIGTERM, and so does its child).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

CHILD = """
import pathlib, signal, sys, time
pathlib.Path("/proc/self/comm").write_text("VLLM::Worker")
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ballast = b"x" * (64 << 20)
print("ready", flush=True)
time.sleep(60)
"""
PIECES = (("Sal", [7]), ("ut, toi", [8, 9]), ("", [2]))


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM 0.32 does, as far as the tools look at it."""

    passes = 3

    def do_GET(self) -> None:
        self._send(b"")

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "brittle":
            print("out of luck", flush=True)
            os._exit(9)
        if self.path == "/collective_rpc":
            assert question == {"method": "subspec_statistics"}
            answer = {"target_passes": Handler.passes, "accepted_by_level": [2] * Handler.passes}
            self._send(json.dumps({"results": [answer]}).encode())
        else:
            Handler.passes += 2
            assert question["return_token_ids"]
            self._send(b"".join(b"data: %s\n\n" % chunk for chunk in _chunks(question)))

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silence."""


def _chunks(question: dict[str, Any]) -> list[bytes]:
    base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": question["model"]}
    first = {"prompt_token_ids": [1, 4, 5], "choices": [_choice("", None)]}
    pieces = [{"choices": [_choice(text, ids)]} for text, ids in PIECES]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    last = {"choices": [], "usage": usage}
    return [*(json.dumps(base | part).encode() for part in (first, *pieces, last)), b"[DONE]"]


def _choice(text: str, token_ids: list[int] | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "token_ids": token_ids}


def _stop(*_: object) -> None:
    child.terminate()
    sys.exit(0)


if __name__ == "__main__":
    PORT, MODE, PID_FILE = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    print("fake server starts", flush=True)
    if MODE == "dead":
        sys.exit("cannot find the weights")
    child = subprocess.Popen([sys.executable, "-c", CHILD, MODE], stdout=subprocess.PIPE)
    child.stdout.readline()
    PID_FILE.write_text(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else _stop)
    if MODE == "mute":
        time.sleep(60)
    HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
