"""Certificates: what the exact search leaves, what another run takes from it, and every one that is refused."""

import dataclasses
import json

import pytest

from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Budget, BudgetExhausted, run_search
from haap_rl.search.certificate import FILE, KEYS, load_certificate, problem_key
from haap_rl.search.exact import Exact, Proof
from haap_rl.space.options import SpaceSpec

COMMAND = "python -m haap_rl.train +search=exact model=gpt3_350m"
SPEC = SpaceSpec(num_microbatches=(16, 32), max_stages=4)


@pytest.fixture(scope="module")
def target():
    return load_problem("gpt3_350m", "v100x4_t4x4")


@pytest.fixture(scope="module")
def proven(target):
    """The exact search's result."""
    return run_search(Exact(), target, Budget(evaluations=2000), space=SPEC)


@pytest.fixture
def written(proven, tmp_path):
    """Writes the certificate, changed, and returns its path."""

    def write(**changes):
        path = tmp_path / FILE
        path.write_text(json.dumps({**json.loads(proven.artifacts[FILE]), **changes}))
        return path

    return write


def test_a_certificate_gives_the_bound_that_was_proven_from_its_file_or_its_directory(target, proven, written):
    path = written()
    assert proven.proven_optimal
    certificate = load_certificate(path, target, SPEC, COMMAND)
    assert certificate.lower_bound_s == proven.lower_bound_s
    assert certificate.iteration_time_s == pytest.approx(proven.estimate.iteration_s, rel=1e-9)
    assert load_certificate(str(path.parent), target, SPEC, COMMAND) == certificate
    assert list(json.loads(path.read_text())) == list(KEYS)


def test_two_runs_leave_the_same_certificate_but_for_the_seconds(target, proven):
    again = run_search(Exact(), target, Budget(evaluations=2000), space=SPEC)
    one, two = ({**json.loads(result.artifacts[FILE]), "seconds": 0} for result in (proven, again))
    assert one == two
    assert again.notes == proven.notes
    assert "passes of the dynamic program" in proven.notes[-1]


def test_switches_that_ablate_searchers_take_the_same_certificate_and_another_space_does_not(target, written):
    ablated = dataclasses.replace(SPEC, memory_aware_init=False, load_balance=False)
    assert load_certificate(written(), target, ablated, COMMAND)
    assert problem_key(target, SPEC) != problem_key(target, dataclasses.replace(SPEC, max_stages=3))


def test_a_search_that_ends_before_it_proves_anything_still_certifies_its_plan(target, tmp_path, monkeypatch):
    def ends(proof):
        raise BudgetExhausted

    monkeypatch.setattr(Proof, "bound", ends)
    result = run_search(Exact(), target, Budget(evaluations=100), space=SPEC)
    (tmp_path / FILE).write_bytes(result.artifacts[FILE])
    certificate = load_certificate(tmp_path, target, SPEC, COMMAND)
    assert certificate.iteration_time_s == pytest.approx(result.estimate.iteration_s, rel=1e-9)
    assert certificate.lower_bound_s == result.lower_bound_s


REFUSED = [
    ({"schema": "haap_rl.plan/1"}, ["haap_rl.plan/1", "is not haap_rl.certificate/1"]),
    ({"schema": None}, ["schema=None"]),
    ({"bound": 3}, ["unknown key 'bound'"]),
    ({"problem": "0123456789abcdef", "model": "llama3_8b"}, ["another problem or space", "llama3_8b"]),
    ({"estimator_fingerprint": "0123456789abcdef"}, ["stale", "0123456789abcdef"]),
    ({"estimator_fingerprint": None}, ["stale"]),
    ({"covers": "plans with contiguous device groups"}, ["covers 'plans with contiguous device groups' only"]),
    ({"lower_bound_s": -1.0}, ["lower_bound_s=-1.0"]),
    ({"lower_bound_s": float("nan")}, ["lower_bound_s=nan"]),
    ({"lower_bound_s": float("inf")}, ["lower_bound_s=inf"]),
    ({"lower_bound_s": 10**400, "iteration_time_s": None}, ["lower_bound_s=a number of more than 300 digits"]),
    ({"lower_bound_s": None}, ["lower_bound_s=None"]),
    ({"lower_bound_s": True}, ["lower_bound_s=True"]),
    ({"lower_bound_s": "6.2"}, ["lower_bound_s='6.2'"]),
    ({"lower_bound_s": 7.0}, ["lower_bound_s=7.0", "are no bound and time"]),
    ({"iteration_time_s": float("nan")}, ["iteration_time_s=nan"]),
    ({"iteration_time_s": float("inf")}, ["iteration_time_s=inf"]),
    ({"iteration_time_s": "fast"}, ["iteration_time_s='fast'"]),
    ({"iteration_time_s": 9.0, "lower_bound_s": 8.0}, ["its plan takes 6.2", "not iteration_time_s=9.0"]),
    ({"plan": None}, ["plan"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_any_other_certificate_is_refused_in_one_line_that_names_the_file(target, written, changes, words):
    path = written(**changes)
    with pytest.raises(InputError) as refused:
        load_certificate(path, target, SPEC, COMMAND)
    message = str(refused.value)
    assert "\n" not in message
    assert all(word in message for word in [str(path), *words]), message
    assert COMMAND in message or "plan" in changes or "bound" in changes


def test_only_device_groups_in_one_run_prove_nothing_about_the_space(target, tmp_path):
    result = run_search(Exact(type_contiguous=True), target, Budget(evaluations=2000), space=SPEC)
    (tmp_path / FILE).write_bytes(result.artifacts[FILE])
    with pytest.raises(InputError, match=r"covers 'plans of the declared space in which .* only"):
        load_certificate(tmp_path, target, SPEC, COMMAND)


def test_a_plan_that_beats_a_certificate_refutes_it(target, proven, written):
    """A bound that no plan holds against can be false; then the linear program's stands, and the record says so."""
    certificate = load_certificate(
        written(lower_bound_s=100.0, iteration_time_s=None, plan=None), target, SPEC, COMMAND
    )
    result = run_search(AutoHAAP(), target, Budget(evaluations=200), space=SPEC, proven_s=certificate.lower_bound_s)
    assert result.proven_optimal
    corrected = certificate.beside(result, weaker_bound_s=5.0)
    assert corrected.lower_bound_s == 5.0
    assert not corrected.proven_optimal
    assert "is wrong: this plan is faster than its bound of 100.000 s" in corrected.notes[0]
    sound = load_certificate(written(), target, SPEC, COMMAND)
    assert sound.beside(proven, 5.0).notes[0] == f"bound proven by {sound.path}"
