"""AMP's average device, its cut and its prediction by hand; what does not fit is recomputed or passed over."""

import itertools

import pytest

from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.strategies import amp
from haap_rl.space.options import Option, SpaceSpec
from haap_rl.space.space import Genome
from tests.builders import group, problem, room, set_tables
from tests.space.enumerate_plans import compositions


def three_and_one(**changes):
    """A space on three fast devices and a slow one, one device per stage."""
    groups = (group("fast", per_node=3), group("slow", per_node=1, tflops=20.0))
    settings = {"num_microbatches": (4,), "max_stages": 4, "max_tp": 1, "group_sizes": (1,), "recompute": ("none",)}
    target = problem(groups, {"num_layers": 8}, global_batch_size=8)
    return Objective(target, space=SpaceSpec(**{**settings, **changes})).space


def test_three_fast_devices_and_a_slow_one_average_by_hand():
    space = three_and_one()
    ((genome),) = amp.candidates(space)
    set_tables(space, 4, lambda option: 1 if option.group == 0 else 5, embedding_s=2, head_s=4)
    # a layer: (1 + 1 + 1 + 5) / 4 = 2 s; embedding and head take 2 and 4 s everywhere
    assert amp.average_s(space, 4, genome.options) == (2, 2, 4)


def test_the_cut_balances_average_stages_by_hand():
    space = three_and_one()
    (genome,) = amp.candidates(space)
    set_tables(space, 4, lambda option: 1 if option.group == 0 else 5, embedding_s=2, head_s=4)
    # 8 layers of 2 s, 22 s with embedding and head, so one of four stages takes 6 s at least: 2 + 4, 6, 4 and 2 + 4
    assert amp.cut(space, 4, genome.options).layers == (2, 3, 2, 1)
    # the slow device, which is the last, is thought to be as fast as the others: in truth its layer and head take 9 s


def test_the_prediction_is_the_papers_sum_by_hand(monkeypatch):
    space = three_and_one()
    (genome,) = amp.candidates(space)
    set_tables(space, 4, lambda option: 1 if option.group == 0 else 5, embedding_s=2, head_s=4)
    monkeypatch.setattr(amp, "send_s", lambda *_: 0.5)
    monkeypatch.setattr(amp, "sync_s", lambda space, m, k, layers, first, last: float(layers))
    # stages of 2 + 2x2, 2x2, 2x2 and 4 + 2x2: 22 s, the slowest 8 s three times more, 3 boundaries there and back at
    # 0.5 s, the slowest synchronisation 2 s
    assert amp.predicted_s(space, Genome(4, genome.options, (2, 2, 2, 2))) == 22 + 3 * 8 + 3 + 2


@pytest.mark.parametrize(("embedding_s", "head_s"), [(0, 0), (2, 4), (7, 1), (0, 9)])
def test_the_cut_has_the_minimum_of_every_cut(embedding_s, head_s):
    space = three_and_one()
    (genome,) = amp.candidates(space)
    set_tables(space, 4, lambda option: 1 if option.group == 0 else 5, embedding_s, head_s)

    def pipeline_s(layers):
        stages = [n * 2 + extra for n, extra in zip(layers, (embedding_s, 0, 0, head_s), strict=True)]
        return sum(stages) + 3 * max(stages)

    assert pipeline_s(amp.cut(space, 4, genome.options).layers) == min(map(pipeline_s, compositions(8, 4)))


def test_every_combination_that_uses_what_devices_it_can():
    space = three_and_one(group_sizes=(1, 2), max_stages=3, max_tp=2)
    # one device per stage would be four stages; two per stage leave one of three idle and cannot sit on the slow one
    assert {tuple(space.options[k] for k in genome.options) for genome in amp.candidates(space)} == {
        (Option(0, 1, 2, "none"),),
        (Option(0, 2, 1, "none"),),
    }


def tight(usable_gb):
    target = problem((group("only", per_node=2, memory_gb=room(usable_gb)),), global_batch_size=8, seq_len=1024)
    return target, SpaceSpec(num_microbatches=(2, 4, 8), max_stages=2, max_tp=2, group_sizes=(1, 2))


def test_out_of_memory_turns_recomputation_on_and_else_is_passed_over():
    target, spec = tight(2.2)
    objective = Objective(target, space=spec)
    space = objective.space
    ranked = sorted((amp.predicted_s(space, genome), genome) for genome in amp.candidates(space))
    fits = [
        [space.estimator(space.plan(with_mode(space, genome, mode))).fits for mode in ("none", "selective", "full")]
        for _, genome in ranked
    ]
    assert any(not modes[0] and any(modes) for modes in fits)  # one that recomputation saves
    assert any(not any(modes) for modes in fits)  # and one that nothing saves
    expected = sum(1 + modes.index(True) if any(modes) else 3 for modes in fits)
    result = run_search(amp.AMP(trials=1000), target, Budget(evaluations=1000), space=spec)
    assert result.evaluations == expected
    first = next(i for i, modes in enumerate(fits) if any(modes))
    one = run_search(amp.AMP(trials=1), target, Budget(evaluations=1000), space=spec)
    assert one.evaluations == 3 * first + 1 + fits[first].index(True)


def with_mode(space, genome, mode):
    options = (space.option_index[space.options[k]._replace(recompute=mode)] for k in genome.options)
    return genome._replace(options=tuple(options))


def test_more_trials_are_never_worse_and_keep_the_order_of_the_prediction():
    target, spec = tight(8.0)
    times = [
        run_search(amp.AMP(trials), target, Budget(evaluations=1000), space=spec).estimate.iteration_s
        for trials in (1, 2, 5, 20)
    ]
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))
