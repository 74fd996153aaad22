"""Commands are tested for what they print and write; what one change would buy is left to tests/report."""

import pytest

from haap_rl.report import page
from haap_rl.report.what_if import WhatIf


@pytest.fixture(autouse=True)
def no_what_if(monkeypatch):
    """Reports that plan for no other cluster, which takes a second each."""
    monkeypatch.setattr(page, "what_if", lambda *_: WhatIf(1.0, 1.0, (), ""))
