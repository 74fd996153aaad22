"""What a report says of failures, and the file of the plans that were traded against the one it is about."""

import pytest

from haap_rl.faults.tradeoff import COLUMNS, FIGURES, Tradeoff, front_csv, read_front
from haap_rl.problem.errors import InputError
from haap_rl.report.failures import front_picture, section_under_failures

FACTS = {
    "faults": "mecefo_low",
    "policy": "mecefo",
    "policy_used": "mecefo",
    "method": "counts",
    "states": 1107,
    "expected_tokens_per_s": 27_062.0,
    "expected_tokens_per_s_low": 26_972.0,
    "expected_tokens_per_s_high": 27_100.0,
    "failure_free_tokens_per_s": 38_357.0,
    "gradient_fidelity": 0.823,
    "stopped_share": 0.12,
    "stops_per_hour": 0.056,
    "checkpoint_interval_s": None,
}
FRONT = [Tradeoff(38_357.0, 27_062.0, 0.823), Tradeoff(41_000.0, 20_000.0, 0.7), Tradeoff(30_000.0, 9_000.0, 1.0)]


def test_without_failures_there_is_no_section():
    assert section_under_failures(None, FRONT) == []


def test_the_section_tells_figures_bounds_and_what_was_summed():
    text = "".join(part for part in section_under_failures(FACTS, FRONT) if part is not None)
    for said in ("27,062 tokens/s", "between 26,972 and 27,100", "70.6%", "never", "1,107 combinations of failures"):
        assert said in text, said


def test_one_plan_alone_is_not_drawn():
    assert section_under_failures(FACTS, FRONT[:1])[-1] is None


def test_the_picture_has_a_dot_for_each_plan_and_tells_which_are_best():
    drawing = front_picture(FRONT, FRONT[0][:2])
    assert drawing.count('class="dot') == len(FRONT)
    assert drawing.count('class="ring"') == 1
    assert "best under failures: 27,062 expected" in drawing
    assert "fastest without: 41,000" in drawing


def test_equal_plans_are_drawn_too():
    front_picture([FRONT[0], FRONT[0]], FRONT[0][:2])


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "pareto.csv"
    path.write_text(front_csv((point, [32, "2 on 4x tp1 t4"]) for point in FRONT))
    assert read_front(path) == tuple(FRONT)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "its first line does not begin with"),
        ("a,b,c\n", "its first line does not begin with"),
        (",".join(FIGURES) + "\n1,2\n", "line 2 is not a plan's figures"),
        (",".join(FIGURES) + "\n1,2,3\n1,x,3\n", "line 3 is not a plan's figures"),
        (",".join(FIGURES) + "\n1,nan,3\n", "line 2 is not a plan's figures"),
        (",".join(FIGURES) + "\n-1,2,3\n", "line 2 is not a plan's figures"),
    ],
)
def test_a_broken_front_is_named_with_its_line(tmp_path, text, says):
    path = tmp_path / "pareto.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_front(path)
