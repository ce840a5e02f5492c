"""The sweep: acceptance over settings of shadow, tree and sampling, a line a point, resumable.

The model writes each text once per temperature. Then drafts are replayed along it (see
``draft.replay``), one engine after another, one for each shadow, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_subspec.plan import MachineFigures, ModelShape
from vllm_subspec.tools.bench import Bench
from vllm_subspec.tools.bench_modes import MODES, Mode, Workload
from vllm_subspec.tools.own_process import in_own_process
from vllm_subspec.tools.sweep_engine import ReplayEngine, Texts, replay_engine
from vllm_subspec.tools.sweep_file import Record, Results, matching
from vllm_subspec.tools.sweep_grid import AXES, PLANNED, Grid, Setting
from vllm_subspec.tools.sweep_points import Shadows, point

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sweep:
    """One sweep.

    Attributes:
        model: folder of the target.
        grid: what is measured.
        prompts: user messages; the model's answers are the texts.
        new_tokens: of each answer, end of text ignored.
        budget_bytes: what "planned" plans for, and measured points are run in.
        machine: for predictions.
    """

    model: Path
    grid: Grid
    prompts: Sequence[str]
    new_tokens: int
    budget_bytes: int | None
    machine: MachineFigures

    def run(self, results: Results) -> None:
        """Measure what ``results`` does not hold yet.

        Raises:
            WorkerError: an engine's process died.
            UnsupportedError: no kernel serves one of the shadows.
            BudgetError: the budget is too small.
        """
        settings = self.grid.settings()
        missing = [setting for setting in settings if self._depths_left(results, setting)]
        with tqdm(total=len(settings), initial=len(settings) - len(missing), desc="Sweep") as bar:
            for shadow, group in groupby(missing, lambda setting: setting.shadow):
                bar.set_postfix_str(f"{shadow.bits} bits, {shadow.resident_layers} resident")
                of_shadow = list(group)
                in_own_process(self._replay, shadow, of_shadow, results.path)
                results.refresh()
                bar.update(len(of_shadow))

    def _depths_left(self, results: Results, setting: Setting) -> list[int]:
        wanted = setting.to_json()
        if setting.bits == PLANNED:
            del wanted["resident_layers"]
        done = {record["depth"] for record in matching(results.of_kind("point"), **wanted)}
        return [depth for depth in self.grid.depths if depth not in done]

    def _replay(self, shadow: Setting, settings: Sequence[Setting], file: Path) -> None:
        options, at_once = shadow.options(), len(self.prompts)
        if shadow.bits == PLANNED:  # for one sequence, as a measured point is run
            options["memory_budget"], at_once = self.budget_bytes, 1
        with replay_engine(self.model, options, at_once, self.new_tokens) as engine:
            self._append_points(engine, settings, Results.read(file))

    def _append_points(
        self, engine: ReplayEngine, settings: Sequence[Setting], results: Results
    ) -> None:
        shape = ModelShape.read(self.model)
        shadows = Shadows(engine.placement, engine.shadow_bytes)
        for setting in settings:
            texts = self._texts(engine, setting.temperature, results)
            depths = self._depths_left(results, setting)
            passes = engine.replay(
                texts, setting.temperature, setting.width, setting.draft_temperature, depths
            )
            results.append(
                point(setting, depth, of_depth, shadows, shape, self.machine)
                for depth, of_depth in zip(depths, zip(*passes, strict=True), strict=True)
            )

    def _texts(self, engine: ReplayEngine, temperature: float, results: Results) -> Texts:
        known = matching(results.of_kind("texts"), temperature=temperature)
        if not known:
            texts = engine.write(self.prompts, self.new_tokens, temperature)
            known = [{"kind": "texts", "temperature": temperature, "texts": texts}]
            results.append(known)
        return [(list(tokens), num_prompt) for tokens, num_prompt in known[0]["texts"]]

    def measure(self, results: Results, count: int, say: Say) -> None:
        """Run the greedy points that are predicted the fastest, and plain streaming, by bench.

        Bench judges their outputs first and tells no speed if a token was wrong.

        Raises:
            WorkerError: a run failed.
        """
        assert self.budget_bytes is not None
        done = results.of_kind("measured")
        candidates = [
            record
            for record in matching(results.of_kind("point"), temperature=0.0, has_kernel=True)
            if record["bits"] != PLANNED and not matching(done, **identity(record))
        ]
        candidates.sort(key=lambda record: -record["predicted"]["tokens_per_s"])
        chosen = {name_of(record): record for record in candidates[:count]}
        if not chosen:
            return
        work = Workload(
            self.model, self.budget_bytes, tuple(self.prompts), self.new_tokens, max_model_len=512
        )
        modes = [Mode(name, name, _options(record)) for name, record in chosen.items()]
        [report] = Bench(work, [MODES["plain"], *modes], 1, False).rounds(say)
        if not report["gate"]["passed"]:
            say("the gate is red, so no measured speed is told")
            return
        plain = report["modes"]["plain"]["decode_tokens_per_s"]["median"]
        results.append(
            _measured(record, report["modes"][name], plain) for name, record in chosen.items()
        )


def identity(record: Record) -> dict[str, Any]:
    """The settings that make a point."""
    return {name: record[name] for name in (*AXES, "depth")}


def name_of(record: Record) -> str:
    """A point in a few words."""
    return (
        f"{record['bits']} bits in groups of {record['group_size']}, "
        f"{record['resident_layers']} resident, {record['width']}x{record['depth']}, "
        f"T_d {record['draft_temperature']}"
    )


def _options(record: Record) -> dict[str, Any]:
    names = ("bits", "group_size", "resident_layers", "width", "depth", "draft_temperature")
    whole = {"max_nodes": record["width"] * record["depth"]}
    return {name: record[name] for name in names} | whole


def _measured(record: Record, told: Mapping[str, Any], plain: float) -> dict[str, Any]:
    figures = ("decode_tokens_per_s", "acceptance_length", "draft_step_ms", "target_pass_ms")
    return {
        "kind": "measured",
        **identity(record),
        **{name: told[name]["median"] for name in figures},
        "plain_tokens_per_s": plain,
    }
