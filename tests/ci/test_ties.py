"""Which differences float32's rounding explains, by a server that tells two log-probabilities."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

from proofs import ties
from proofs.clients import Answer, Choice
from proofs.pool import Case
from proofs.ties import TOLERANCE, Difference, audited

from vllm_subspec.verify.noise import gumbel_noise, peek_integers

EXPECTED, FOUND = [7, 8, 5, 9], [7, 8, 6, 1]
GREEDY = Case("0-greedy", {"temperature": 0.0, "prompt": [3]})
SEEDED = Case("1-seeded", {"temperature": 0.5, "seed": 11, "prompt": [3]})


def answer(tokens, index=0, is_whole=True):
    return Answer(200, {index: Choice("", tokens)}, is_whole=is_whole)


@pytest.fixture
def plain(monkeypatch):
    """Of plain vLLM: what it answers again, and its log-probabilities of tokens 5 and 6 there."""
    told = SimpleNamespace(tokens=EXPECTED, logprobs=(0.0, 0.0), index=0, asked=[])

    @contextmanager
    def serve(*_):
        yield SimpleNamespace(url="http://plain")

    def post(url, *, json, **_):
        told.asked.append(json)
        pairs = zip(json["logprob_token_ids"], told.logprobs, strict=True)
        tops = [{}, {}, {f"token_id:{token}": value for token, value in pairs}, {}]
        part = {"index": told.index, "token_ids": told.tokens, "logprobs": {"top_logprobs": tops}}
        return SimpleNamespace(json=lambda: {"choices": [part]})

    monkeypatch.setattr(ties, "serve", serve)
    monkeypatch.setattr(ties.httpx, "post", post)
    return told


@pytest.mark.parametrize(("gap", "is_tie"), [(TOLERANCE / 2, True), (2 * TOLERANCE, False)])
def test_greedy_tokens_by_their_logits(plain, gap, is_tie):
    plain.logprobs = (-1.0, -1.0 - gap)
    verdict = audited([Difference(GREEDY, answer(EXPECTED), answer(FOUND), "")], Path(), Path())
    assert (len(verdict.near_ties), len(verdict.wrong)) == (is_tie, not is_tie)
    assert plain.asked[0]["logprob_token_ids"] == [5, 6]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("gap", "is_tie"), [(TOLERANCE / 2, True), (2 * TOLERANCE, False)])
def test_sampled_tokens_by_their_logits_and_the_noise_of_their_seed(plain, gap, is_tie, index):
    draw = peek_integers(torch.Generator().manual_seed(11 + index), 3)[2]
    noise = gumbel_noise(draw, torch.tensor([5, 6]))
    plain.index = index
    plain.logprobs = (-float(noise[0]), -float(noise[1]) - gap / 0.5)
    expected, found = answer(EXPECTED, index), answer(FOUND, index)
    verdict = audited([Difference(SEEDED, expected, found, "")], Path(), Path())
    assert (len(verdict.near_ties), len(verdict.wrong)) == (is_tie, not is_tie)


def test_a_part_of_an_answer_is_compared_as_far_as_it_came(plain):
    found = answer(FOUND[:3], is_whole=False)
    assert audited([Difference(GREEDY, answer(EXPECTED), found, "")], Path(), Path()).near_ties


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (EXPECTED, EXPECTED[:2]),
        (EXPECTED[:2], EXPECTED),
        (EXPECTED, EXPECTED),
    ],
    ids=["ended-early", "went-on", "no-token-differs"],
)
def test_what_is_not_about_two_tokens_is_wrong(plain, expected, found):
    verdict = audited([Difference(GREEDY, answer(expected), answer(found), "")], Path(), Path())
    assert verdict.wrong
    assert not plain.asked


def test_where_plain_vllm_goes_another_way_before_nothing_is_explained(plain):
    plain.tokens = [7, 1, 5, 9]
    assert audited([Difference(GREEDY, answer(EXPECTED), answer(FOUND), "")], Path(), Path()).wrong


def test_nothing_differs_no_server(monkeypatch):
    monkeypatch.setattr(ties, "serve", None)
    assert audited([], Path(), Path()) == ties.Verdict([], [])
