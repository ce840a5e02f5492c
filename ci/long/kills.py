"""kill -9 at random moments of a server's life: is what comes after right, and what is left?

The API server, the engine core and the worker are killed in turn: while the model loads, while
shadows are made, while the spill is written, while answers are computed for a few clients. After
each time every process must end by itself, and every client get an error or a closed connection
after nothing but right tokens. The next start on the same cache must answer as vLLM without SubSpec
does, use a spill that was whole, and leave in the cache what one start leaves, no file more. Some
of those starts are ended by SIGTERM while answers are streamed. Exit status 1: something was not
so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proofs.clients import Answer, difference, references
from proofs.mortal import VICTIMS, Mortal, started
from proofs.pool import pool
from proofs.servers import serve
from proofs.ties import Difference, Verdict, audited
from proofs.traffic import Traffic

from vllm_subspec import envs
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.serving import interrupt_on_termination

POOL = 50
CLIENTS = 4
HANG_S = 120.0
SUBSPEC = {"bits": 4, "width": 4, "depth": 8}  # 4 bits take the longest to make
START = ("loading", "quantising", "writing")
PHASES = tuple(phase for start in START for phase in (start, "decoding", "decoding"))


class Cache:
    """The cache of all starts: what lies there, and what should."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        shutil.copytree(envs.cache_dir() / "kernels", folder / "kernels")
        self._whole: set[str] = set()
        self._span_s = 0.0

    def files(self) -> set[str]:
        """Paths of all files, temporary ones too."""
        return {str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()}

    def empty(self) -> None:
        """Remove all but the kernels."""
        for part in ("shadows", "spill"):
            shutil.rmtree(self.folder / part, ignore_errors=True)

    def learn(self) -> None:
        """Take what is there now, after a first start, for what every start must leave."""
        self._whole = self.files()
        times = [(self.folder / name).stat().st_mtime for name in self._of("shadows")]
        self._span_s = max(times) - min(times)

    def surplus(self) -> list[str]:
        """What is there and should not, or is not there and should."""
        return sorted(self.files() ^ self._whole)

    def spill_stamp(self) -> tuple[int, int] | None:
        """Of a whole spill; ``None`` where its manifest is missing."""
        spills = list(self.folder.glob("spill/*.spill"))
        if not spills or not spills[0].with_suffix(".json").exists():
            return None
        status = spills[0].stat()
        return status.st_ino, status.st_mtime_ns

    def has_begun(self, phase: str) -> bool:
        """Whether a start with an empty cache has come to ``phase``."""
        pattern = {"quantising": "shadows/*.safetensors", "writing": "spill/*.spill"}[phase]
        return any(self.folder.glob(pattern))

    def pause(self, draw: random.Random) -> float:
        """Seconds to a random moment of quantising or writing."""
        return draw.random() * self._span_s

    def _of(self, part: str) -> list[str]:
        return [name for name in self._whole if name.startswith(f"{part}/")]


@dataclass
class Round:
    """One kill, and the start after it.

    Attributes:
        victim, phase: what was killed, and when.
        found: what lay in the cache then.
        problems: what was not as it must be.
        answers, failures: of the clients that were there.
        gone_s: until the last process had ended.
    """

    victim: str
    phase: str
    found: str = ""
    problems: list[str] = field(default_factory=list)
    answers: int = 0
    failures: int = 0
    gone_s: float = 0.0


class Proof:
    """Kills and starts on one cache."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._cases = pool(lambda text: list(tokenizer.encode(text).ids), POOL, seed)
        self._model, self._folder, self._draw = model, folder, random.Random(seed)
        self._expected: list[Answer] = []
        self.cache = Cache(folder / "cache")
        self.rounds: list[Round] = []
        self.terminations: list[Round] = []
        self._differences: list[Difference] = []
        self._is_checked = True

    def prepare(self) -> None:
        """Right answers, and one undisturbed start."""
        with serve(self._model, self._folder / "plain.log", None) as plain:
            self._expected = asyncio.run(references(plain.url, self._cases))
        first = Round("none", "first start")
        with self._server() as server:
            self._check_answers(server, first)
            self.cache.learn()
            server.process.terminate()
            server.survivors()
        if wrong := first.problems + self.audited().wrong:
            raise SystemExit(f"not even undisturbed: {wrong}")
        print(f"first start left {len(self.cache.files())} files", flush=True)

    def kill_once(self, victim: str, phase: str) -> None:
        """Kill one process of a server; the start after the last kill was checked before."""
        this = Round(victim, phase)
        if phase == "decoding":
            with self._server() as server:
                self._check_start(server)
                self._end_among_clients(server, this, lambda: server.kill(victim))
        else:
            self.check_last()
            if phase != "loading" or self._draw.random() < 0.5:
                self.cache.empty()
            with self._server() as server:
                self._kill_at_start(server, this)
                self._see_what_is_left(server, this)
        self.rounds.append(this)
        print(json.dumps(asdict(this)), flush=True)

    def check_last(self) -> None:
        """The start after the last kill, if that was not checked; SIGTERM ends it among clients."""
        if not self._is_checked:
            with self._server() as server:
                self._check_start(server)
                this = Round("API server", "SIGTERM while decoding")
                self._end_among_clients(server, this, lambda: server.process.terminate() is None)
            self.terminations.append(this)
            print(json.dumps(asdict(this)), flush=True)

    def audited(self) -> Verdict:
        """All answers that differed."""
        return audited(self._differences, self._model, self._folder / "plain.log")

    def _server(self) -> Any:
        return started(self._model, self._folder / "server.log", SUBSPEC, self.cache.folder)

    def _check_start(self, server: Mortal) -> None:
        """After the last kill: right answers, a whole spill used, and no file too many."""
        if self._is_checked:
            return
        former, stamp = self.rounds[-1], self.cache.spill_stamp()
        self._check_answers(server, former)
        if stamp is not None and stamp != self.cache.spill_stamp():
            former.problems.append("a whole spill was written again")
        if surplus := self.cache.surplus():
            former.problems.append(f"files differ from those of one start: {surplus}")
        self._is_checked = True

    def _check_answers(self, server: Mortal, former: Round) -> None:
        if not server.wait_for(server.is_healthy):
            tail = server.log.read_text(errors="replace")[-2000:]
            former.problems.append(f"the next start failed: {tail}")
            return
        some = self._draw.sample(range(POOL), 12)
        found = asyncio.run(references(server.url, [self._cases[i] for i in some]))
        for index, answer in zip(some, found, strict=True):
            case, expected = self._cases[index], self._expected[index]
            if what := difference(expected, answer):
                what = f"after {former.victim}, {former.phase}: {what}"
                self._differences.append(Difference(case, expected, answer, what))

    def _kill_at_start(self, server: Mortal, this: Round) -> None:
        if this.phase == "loading":
            time.sleep(self._draw.random() * 10)
        elif server.wait_for(lambda: self.cache.has_begun(this.phase), poll_s=0.002):
            time.sleep(self.cache.pause(self._draw))
        if not server.wait_for(lambda: server.kill(this.victim)):
            this.problems.append("the server ended by itself")

    def _end_among_clients(self, server: Mortal, this: Round, kill: Callable[[], bool]) -> None:
        seed = self._draw.randrange(1 << 30)
        traffic = Traffic(server.url, self._cases, self._expected, seed, HANG_S)

        async def kill_soon() -> None:
            await asyncio.sleep(0.3 + self._draw.random() * 8)
            if not kill():
                this.problems.append("there was no such process")

        async def both() -> None:
            end = time.monotonic() + HANG_S
            await asyncio.gather(traffic.run(CLIENTS, lambda: time.monotonic() > end), kill_soon())

        asyncio.run(both())
        this.answers, this.failures = traffic.answered.total(), len(traffic.failures)
        self._differences += traffic.wrong
        this.problems += [f"hung: {name}" for name in traffic.hung]
        if this.failures < CLIENTS:
            this.problems.append(f"only {this.failures} of {CLIENTS} clients heard of it")
        self._see_what_is_left(server, this)

    def _see_what_is_left(self, server: Mortal, this: Round) -> None:
        began = time.monotonic()
        survivors = server.survivors()
        this.gone_s = round(time.monotonic() - began, 1)
        if survivors:
            this.problems.append(f"still alive: {survivors}")
        whole = "whole" if self.cache.spill_stamp() else "unfinished or missing"
        self._is_checked = this.phase.startswith("SIGTERM")
        this.found = f"{len(self.cache.files())} files, spill {whole}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, small")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here too")
    given = parser.parse_args()
    interrupt_on_termination()
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(given.model, Path(folder), given.seed)
        proof.prepare()
        for number in range(given.times):
            turn, step = divmod(number, len(PHASES))
            victim = turn + step + step // len(START)  # each phase meets each of them
            proof.kill_once(VICTIMS[victim % len(VICTIMS)], PHASES[step])
        proof.check_last()
        audit = proof.audited()
        left = sorted(path.name for path in (Path(folder) / "tmp").iterdir())
    ends = [*proof.rounds, *proof.terminations]
    problems = [f"{end.victim}, {end.phase}: {p}" for end in ends for p in end.problems]
    problems += audit.wrong
    report = {
        "passed": not problems,
        "kills": given.times,
        "problems": problems,
        "near_ties": audit.near_ties,
        "ends": [asdict(end) for end in ends],
        "left_by_vllm_in_tmp": left,
        "seed": given.seed,
        "provenance": provenance(" ".join(sys.argv)),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("passed", "kills", "problems")}, indent=2))
    return 0 if not problems else 1


if __name__ == "__main__":
    raise SystemExit(main())
