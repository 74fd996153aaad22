"""Every open question has an option, checked in one line, and asking it needs no torch."""

import subprocess
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from haap_rl.mecefo.options import CHOICES, MecefoOptions, Techniques


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rank", 0, "mecefo: rank=0 must be a whole number of at least 1; give for example rank=64"),
        ("rank", True, "mecefo: rank=True must be a whole number of at least 1"),
        ("refresh_steps", 2.5, "mecefo: refresh_steps=2.5 must be a whole number"),
        ("takeover", "nearest", "mecefo: takeover='nearest' must be one of ring, most_slack, spread"),
        ("low_rank", "gate", "mecefo: low_rank='gate' must be a list of some of gate, up, down"),
        ("low_rank", ["gate", "query"], "mecefo: low_rank=['gate', 'query'] must be a list"),
        ("low_rank", [["gate"]], "mecefo: low_rank=[['gate']] must be a list"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_in_one_line(key, value, says):
    with pytest.raises(ValueError, match="mecefo") as refused:
        MecefoOptions(**{key: value})
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


def test_techniques_are_checked_too():
    with pytest.raises(ValueError, match="skip='mlp' must be one of attention, ffn, none"):
        Techniques(skip="mlp")


def test_choices_are_those_of_the_types():
    hints = get_type_hints(MecefoOptions)
    assert {key: get_args(hints[key]) for key in CHOICES} == CHOICES
    assert {f.name for f in fields(MecefoOptions)} == {"rank", "refresh_steps", "low_rank", *CHOICES}


def test_matrices_have_one_order_whatever_order_they_are_named_in():
    assert MecefoOptions(low_rank=["down", "gate"]) == MecefoOptions(low_rank=("gate", "down"))


def test_options_need_no_torch():
    code = "import sys, haap_rl.mecefo.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
