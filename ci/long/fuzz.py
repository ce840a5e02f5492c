"""Random requests, contradictory ones included: SubSpec answers, or refuses, as plain vLLM does.

Hypothesis draws the cases, the same ones for a seed: one to four requests that arrive, and are
given up, while others run. Plain vLLM gets all of them first, then SubSpec. Equal are: tokens,
texts, reasons to stop, and log-probabilities; or type and message of the error. What was given up
must agree as far as both came; an unseeded sampled answer only in its form. Exit status 1:
something differed; it is printed with the number under which ``--only`` runs it alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engine"))

from conftest import Engine, write_lively_model  # the tests' own
from proofs.fuzz_cases import ENGINE, SUBSPEC, cases
from proofs.fuzz_runs import differences, run

from vllm_subspec.tools.example_model import ExampleModel, write_example_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    drawn = list(enumerate(cases(given.cases, given.seed)))
    chosen = [(i, case) for i, case in drawn if given.only in (None, i)]
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"  # for its tokenizer
        write_example_model(small, ExampleModel(dtype="float32", num_layers=1))
        model = write_lively_model(Path(folder) / "lively", small)
        outcomes = []
        for subspec in (None, SUBSPEC):
            engine = Engine(model, subspec, ENGINE)
            try:
                outcomes.append([run(engine.llm, case, str(i)) for i, case in chosen])
            finally:
                engine.close()
    wrong = refused = 0
    for (i, case), plain, found in zip(chosen, *outcomes, strict=True):
        refused += sum(outcome.error is not None for outcome in plain)
        for problem in differences(case, plain, found):
            wrong += 1
            print(f"--seed {given.seed} --cases {given.cases} --only {i}: {problem}\n  {case}")
    total = sum(len(case) for _, case in chosen)
    print(
        f"{len(chosen)} cases, {total} requests, {refused} of them refused by plain vLLM: "
        f"{wrong} differences"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
