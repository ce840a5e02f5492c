"""Live tuning against brute force: the best cut of the true acceptances and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.acceptance import Outcome
from vllm_subspec.draft.tuning import NOTHING, Change, Cut, DepthTuner, deepest

FIXED = settings(deadline=None, max_examples=30, derandomize=True)


@dataclass(frozen=True)
class Machine:
    """How often a level is accepted below an accepted parent, and what work takes.

    The accepted node is the best of its level with chance ``first``, else ``others`` nodes lie
    before it.
    """

    acceptance: Callable[[int], float]
    step_s: float
    pass_s: float  # of the stream
    row_s: float = 0.0  # of the products of one row, which hide under the stream
    hidden_steps: int = 0
    first: float = 1.0
    others: int = 8
    sequence_s: float = 0.0  # what each further tree adds to a step
    floor_s: float | None = None  # what is known of the stream; None: the truth

    def pass_seconds(self, rows: int) -> float:
        return max(self.pass_s, rows * self.row_s)

    def rate(self, cut: Cut, sequences: int = 1) -> float:
        """Expected tokens a second, written out: every path's probability, one by one."""
        if cut == NOTHING:
            return sequences / self.pass_seconds(sequences)
        tokens, reach = 1.0, 1.0
        for level in range(min(cut.depth, cut.nodes)):
            far = 0.0 if level + 1 + self.others > cut.nodes else 1 - self.first
            reach *= self.acceptance(level) * (self.first + far)
            tokens += reach
        followed = reach * self.acceptance(cut.depth)
        hidden = self.hidden_steps if sequences == 1 else 0
        steps = cut.depth - followed * min(cut.depth, hidden)
        seconds = self.pass_seconds(sequences * (1 + cut.nodes))
        step_s = self.step_s + (sequences - 1) * self.sequence_s
        return sequences * tokens / (seconds + steps * step_s)

    def best(self, most: int, nodes: int = 64, sequences: int = 1, width: int = 4) -> Cut:
        cuts = [NOTHING]
        cuts += [Cut(d, m) for d in range(1, most + 1) for m in range(1, min(nodes, width * d) + 1)]
        return max(cuts, key=lambda cut: self.rate(cut, sequences))

    def outcome(self, cut: Cut, random: Random) -> Outcome:
        least: list[int] = []
        while len(least) < cut.depth and random.random() < self.acceptance(len(least)):
            extra = 0 if random.random() < self.first else self.others
            node = max(len(least) + 1 + extra, (least or [0])[-1] + 1)
            if node > cut.nodes:
                break
            least.append(node)
        return Outcome(cut.depth, cut.nodes, least)

    def cycle(self, tuner: DepthTuner, random: Random, sequences: int = 1, width: int = 4) -> Cut:
        """Draft and verify once; what was drafted."""
        tuner.pass_floor_s = self.pass_s if self.floor_s is None else self.floor_s
        cut = tuner.next_cut(sequences)
        cut = Cut(cut.depth, min(cut.nodes, width * cut.depth))
        step_s = self.step_s + (sequences - 1) * self.sequence_s
        tuner.observe_draft(sequences, cut.depth, cut.depth * step_s)
        outcomes = [self.outcome(cut, random) for _ in range(sequences)] if cut.depth else []
        rows = sequences * (1 + cut.nodes)
        hidden = self.hidden_steps if sequences == 1 and cut.depth else 0
        tuner.observe_pass(rows, self.pass_seconds(rows), hidden, outcomes)
        return cut

    def run(self, tuner: DepthTuner, cycles: int, random: Random, sequences: int = 1) -> list[Cut]:
        return [self.cycle(tuner, random, sequences) for _ in range(cycles)]

    def achieved(self, cuts: list[Cut], sequences: int = 1) -> float:
        """Tokens a second over these cycles, expected."""
        rates = [self.rate(cut, sequences) for cut in cuts]
        return len(rates) / sum(1 / rate for rate in rates)


@dataclass
class Log:
    """Changes as they were told."""

    changes: list[Change] = field(default_factory=list)


def tuner_of(first: int = 16, most: int = 24, nodes: int = 64, log: Log | None = None):
    told = (log or Log()).changes.append
    return DepthTuner(first, most, 4, nodes, told)


MACHINES = {
    "good-draft-slow-pass": Machine(lambda level: 0.97, 0.01, 1.0),
    "good-draft-slow-step": Machine(lambda level: 0.97, 0.2, 1.0),
    "poor-draft": Machine(lambda level: 0.5, 0.05, 1.0),
    "hopeless-draft": Machine(lambda level: 0.05, 0.3, 1.0),
    "a-wall-below-level-6": Machine(lambda level: 0.98 if level < 6 else 0.1, 0.02, 1.0),
    "fading": Machine(lambda level: 0.99 - 0.03 * level, 0.02, 1.0),
    "hidden-steps": Machine(lambda level: 0.95, 0.1, 1.0, hidden_steps=8),
    "costly-nodes": Machine(lambda level: 0.9, 0.02, 0.3, row_s=0.02),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("first", [1, 16, 32])
def test_it_comes_near_the_best_cut_from_anywhere(machine, first):
    most = 32
    tuner = tuner_of(first, most, 128)
    cuts = machine.run(tuner, 600, Random(first))[-300:]
    assert machine.achieved(cuts) > 0.93 * machine.rate(machine.best(most, 128))


BATCHES = {
    "wide-trees": Machine(
        lambda level: 0.95, 0.03, 1.0, row_s=0.008, first=0.8, others=6, sequence_s=0.006
    ),
    "narrow-trees": Machine(lambda level: 0.9, 0.03, 1.0, row_s=0.008, sequence_s=0.006),
    "cheap-rows": Machine(lambda level: 0.9, 0.03, 1.0, row_s=0.0005, sequence_s=0.001),
}


@pytest.mark.parametrize("machine", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16, 32])
def test_it_comes_near_the_best_cut_for_any_number_of_requests(machine, sequences):
    cuts = machine.run(tuner_of(), 150, Random(sequences), sequences)[-75:]
    best = machine.best(24, sequences=sequences)
    assert machine.achieved(cuts, sequences) > 0.9 * machine.rate(best, sequences)


def test_as_the_batch_grows_trees_shrink_and_then_nothing_is_drafted():
    log = Log()
    machine, tuner, nodes = BATCHES["narrow-trees"], tuner_of(log=log), []
    for sequences in (1, 2, 4, 8, 16, 32, 64, 256):
        nodes.append(machine.run(tuner, 60, Random(0), sequences)[-1].nodes)
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > 15
    assert nodes[2] > 0
    assert nodes[-1] == 0
    (change,) = log.changes
    assert (change.is_aside, change.reason) == (True, "batch")
    assert change.plain_rate > change.drafting_rate
    assert machine.run(tuner, 12, Random(0), 1)[-1].nodes > 15
    assert [change.is_aside for change in log.changes] == [True, False]


def test_rejected_drafts_are_given_up_and_tried_again():
    log = Log()
    bad = Machine(lambda level: 0.02, 0.1, 1.0)
    good = Machine(lambda level: 0.9, 0.1, 1.0)
    tuner, random = tuner_of(log=log), Random(1)
    cuts = bad.run(tuner, 400, random)
    assert 0 < sum(cut != NOTHING for cut in cuts[-300:]) < 10, "probes only"
    (change,) = log.changes
    assert (change.is_aside, change.reason, change.sequences) == (True, "acceptance", 1)
    tuner.look_again()  # another request, of another text
    cuts = good.run(tuner, 200, random)
    assert good.achieved(cuts[-100:]) > 0.9 * good.rate(good.best(24))
    assert [change.is_aside for change in log.changes] == [True, False]


def test_a_draft_that_was_slow_for_a_while_comes_back():
    """Another process took the cores: one probe without it is enough."""
    log, random = Log(), Random(2)
    tuner = tuner_of(log=log)
    Machine(lambda level: 0.9, 0.1, 1.0).run(tuner, 40, random)
    Machine(lambda level: 0.9, 20.0, 1.0).run(tuner, 100, random)
    assert tuner.is_aside
    healthy = Machine(lambda level: 0.9, 0.1, 1.0)
    cuts = healthy.run(tuner, 150, random)
    assert healthy.achieved(cuts[-20:]) > 0.9 * healthy.rate(healthy.best(24))
    assert [change.is_aside for change in log.changes] == [True, False]


def test_a_probe_of_one_request_tells_of_several():
    tuner, random = tuner_of(), Random(4)
    healthy = Machine(lambda level: 0.9, 0.1, 1.0, sequence_s=0.01)
    slow = Machine(lambda level: 0.9, 20.0, 1.0, sequence_s=1.0)
    for sequences in (1, 4):
        healthy.run(tuner, 20, random, sequences)
    slow.run(tuner, 100, random, 4)
    assert tuner.is_aside
    healthy.run(tuner, 150, random, 1)
    cuts = healthy.run(tuner, 20, random, 4)
    assert NOTHING not in cuts


def test_a_new_request_changes_nothing_where_the_batch_is_too_large():
    machine, tuner = BATCHES["narrow-trees"], tuner_of()
    for _ in range(300):
        tuner.look_again()
        last = machine.cycle(tuner, Random(0), 256)
    assert last == NOTHING
    assert tuner.is_aside
    tuner.look_again()
    assert machine.cycle(tuner, Random(0), 256) == NOTHING


@pytest.mark.parametrize("seed", range(4))
def test_noise_at_the_crossover_does_not_make_it_waver(seed):
    """Passes and steps that take a fifth more or less, and rates that are equal in truth."""
    log, random = Log(), Random(seed)
    tuner = tuner_of(log=log)

    def noisy() -> Machine:
        swing = random.uniform(0.8, 1.2)
        return Machine(lambda level: 0.5, 0.5 * swing, random.uniform(0.8, 1.2), floor_s=0.9)

    true = Machine(lambda level: 0.5, 0.5, 1.0)
    assert true.rate(true.best(24)) == pytest.approx(true.rate(NOTHING), rel=0.05)
    for _ in range(1000):
        noisy().cycle(tuner, random)
    assert len(log.changes) < 12


def test_a_burst_at_the_start_shares_the_nodes_of_one():
    """Nothing is known of the machine yet: a pass must not become 32 times as long."""
    for sequences, nodes in ((1, 64), (2, 32), (32, 2), (100, 1)):
        cut = tuner_of().next_cut(sequences)
        assert cut == Cut(min(16, nodes), nodes)


def test_a_larger_batch_is_approached_step_by_step():
    machine, tuner = BATCHES["cheap-rows"], tuner_of()
    machine.run(tuner, 20, Random(0), 1)
    largest = 65
    for cut in machine.run(tuner, 20, Random(0), 32):
        rows = 32 * (1 + cut.nodes)
        assert rows <= 2 * largest
        largest = max(largest, rows)
    assert largest > 500


def test_a_prompt_pass_tells_what_rows_cost():
    """So the first drafts of a batch need not be tried to be found too large."""
    machine, tuner = BATCHES["narrow-trees"], tuner_of()
    machine.run(tuner, 20, Random(0), 1)
    tuner.observe_prompts(700, machine.pass_seconds(700))
    assert max(cut.nodes for cut in machine.run(tuner, 8, Random(0), 16)) <= 8


@FIXED
@given(
    levels=st.lists(st.floats(0, 1), min_size=1, max_size=24),
    most=st.integers(1, 24),
    nodes=st.integers(1, 200),
    step_s=st.floats(1e-4, 1.0),
    row_s=st.floats(0, 0.1),
    hidden=st.integers(0, 12),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_it_never_leaves_its_range_and_ends_at_the_best_of_its_own_model(
    levels, most, nodes, step_s, row_s, hidden, counts, seed, data
):
    first = data.draw(st.integers(1, most))
    machine = Machine(lambda level: levels[min(level, len(levels) - 1)], step_s, 1.0, row_s, hidden)
    tuner, random = tuner_of(first, most, nodes), Random(seed)
    for sequences in counts:
        cuts = machine.run(tuner, 50, random, sequences)
        assert all(0 <= cut.depth <= most and 0 <= cut.nodes <= nodes for cut in cuts)
        assert all((cut == NOTHING) == (cut.depth == 0 or cut.nodes == 0) for cut in cuts)


def test_its_model_of_known_acceptances_is_the_true_one():
    """Passes that accept 3 of 3 levels, always: only what was told counts."""
    tuner = tuner_of(3, 8, 12)
    tuner.pass_floor_s = 0.5
    machine = Machine(lambda level: 1.0, 0.1, 0.5)
    tuner.observe_draft(1, 3, 0.3)
    for _ in range(200):
        tuner.observe_pass(13, 0.5, 0, [Outcome(3, 12, [1, 2, 3])])
    for depth in range(1, 9):
        expected = machine.rate(Cut(depth, 12))
        assert tuner.expected_rate(Cut(depth, 12)) == pytest.approx(expected, rel=2e-3)
    narrow = tuner.expected_rate(Cut(8, 4))
    assert narrow == pytest.approx(5 / (0.5 + 0.8), rel=2e-3), "4 nodes hold 4 levels at most"
    assert tuner.plain_rate(1) == pytest.approx(2.0)
    assert tuner.next_cut(1).depth == 5, "two levels more than were tried"


def test_what_smaller_cuts_would_have_held_is_learnt_from_larger_ones():
    tuner = tuner_of(4, 8, 16)
    tuner.pass_floor_s = 1.0
    tuner.observe_draft(1, 4, 0.4)
    for _ in range(300):  # the second level's node is the seventh best
        tuner.observe_pass(17, 1.0, 0, [Outcome(4, 16, [1, 7])])
    for nodes, tau in ((1, 2.0), (2, 2.0), (6, 2.0), (8, 3.0), (16, 3.0)):
        rate = tuner.expected_rate(Cut(4, nodes))
        assert rate == pytest.approx(tau / 1.4, rel=1e-3), nodes


def test_plain_passes_are_tried_where_nothing_tells_that_they_are_no_shorter():
    """Without a link to measure, a smaller pass is hoped to be shorter, until it was tried."""
    machine, tuner = BATCHES["cheap-rows"], tuner_of()
    tuner.observe_draft(8, 4, 0.2)
    tuner.observe_pass(8 * 65, 1.0, 0, [Outcome(16, 64, range(1, 9))] * 8)
    assert tuner.plain_rate(8) == pytest.approx(8 * 65)
    tuner.observe_pass(8, 1.0, 0, [])
    assert tuner.plain_rate(8) == pytest.approx(8)
    assert machine.run(tuner, 60, Random(0), 8)[-1].depth > 4


def test_a_pass_that_was_slow_once_is_tried_again():
    """The disk paused, or a kernel was made; smaller passes are as fast as ever."""
    tuner, random = tuner_of(), Random(0)
    tuner.observe_draft(1, 16, 0.8)
    tuner.observe_pass(65, 20.0, 0, [Outcome(16, 64, [1, 2])])
    tuner.observe_pass(17, 1.0, 0, [Outcome(4, 16, [1, 2])])
    wide = Machine(lambda level: 0.9, 0.01, 1.0, first=0.6, others=30)
    cuts = wide.run(tuner, 400, random)
    assert cuts[5].nodes < 40
    assert min(cut.nodes for cut in cuts[-50:]) > 40


def test_it_deepens_step_by_step():
    """Levels that were never tried are a guess."""
    tuner = tuner_of(4, 48, 200)
    depths = [cut.depth for cut in MACHINES["good-draft-slow-pass"].run(tuner, 64, Random(0))]
    climbs = [b - a for a, b in pairwise(depths) if b > a]
    assert climbs[:3] == [2, 3, 4]


def test_without_a_timed_step_it_stays():
    tuner = tuner_of(5, 20)
    for _ in range(64):
        tuner.observe_draft(1, 0, 0.0)
        tuner.observe_pass(21, 1.0, 0, [Outcome(5, 20, [])])
        assert tuner.next_cut(1).depth == 5


def test_it_deepens_again_when_the_draft_improves():
    """What deep levels were worth in bad times does not hold for ever."""
    tuner = tuner_of(12, 32)
    bad = Machine(lambda level: 0.1 if level else 0.9, 0.1, 1.0)
    good = Machine(lambda level: 0.97, 0.1, 1.0)
    random = Random(3)
    depths = [cut.depth for cut in bad.run(tuner, 300, random)[-64:]]
    assert depths.count(bad.best(32).depth) > 40
    cuts = good.run(tuner, 600, random)[-200:]
    assert good.achieved(cuts) > 0.9 * good.rate(good.best(32))


def test_a_change_reads_as_a_line_of_the_log():
    batch = Change(True, 12, 14.2, 10.94, 3.06, "batch")
    assert str(batch) == (
        "steps aside, since many requests share each pass: 12 requests decode 14.20 tokens/s "
        "without drafts, and 10.94 with them at an acceptance length of 3.1"
    )
    assert str(Change(False, 1, 1.0, 5.0, 7.0, "acceptance")) == (
        "drafts again: 1 request decodes 1.00 tokens/s without drafts, and 5.00 with them at an "
        "acceptance length of 7.0"
    )


def test_room_for_tuning_is_half_as_much_again():
    assert [deepest(depth) for depth in (1, 4, 16, 40, 64)] == [1, 6, 24, 48, 64]


@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_trees_that_stop_by_themselves_get_the_price_of_a_step(sequences, monkeypatch):
    """What the cut that is best for all trees would bring in the time of one step."""
    machine, tuner = BATCHES["narrow-trees"], tuner_of()
    cut = machine.run(tuner, 100, Random(3), sequences)[-1]
    step_s = machine.step_s + (sequences - 1) * machine.sequence_s
    price = tuner.expected_rate(cut, sequences) * step_s
    monkeypatch.setattr(tuner, "_adaptive", True)
    opened = tuner.next_cut(sequences)
    assert opened == Cut(min(24, opened.nodes), opened.nodes, opened.price)
    assert opened.nodes >= cut.nodes, "a path needs as many nodes as levels"
    assert opened.price == pytest.approx(price, rel=0.1)
    assert cut.price == 0


def test_a_lone_request_after_a_crowd_may_have_deep_trees_at_once():
    """How deep they get is then for each tree to say, not for what the crowd's trees accepted."""
    machine, random = BATCHES["narrow-trees"], Random(0)
    tuner = DepthTuner(16, 24, 4, 64, adaptive=True)
    for cycles, sequences in ((20, 1), (100, 16)):
        machine.run(tuner, cycles, random, sequences)
    assert tuner.next_cut(16).depth < 12
    cut = tuner.next_cut(1)
    assert cut.depth == 24
    assert cut.nodes >= 48


def test_before_anything_is_known_no_tree_stops_by_itself():
    assert DepthTuner(16, 24, 4, 64, adaptive=True).next_cut(1) == Cut(16, 64)
