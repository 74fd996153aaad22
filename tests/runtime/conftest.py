import multiprocessing
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks():
    """Six processes in one group, for all plans."""
    from haap_rl.runtime.session import Session

    with Session(6) as session:
        yield session
    assert not multiprocessing.active_children()
