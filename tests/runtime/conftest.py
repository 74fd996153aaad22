import multiprocessing

import pytest


def pytest_collection_modifyitems(items):
    """Last, whatever the order of the command: `ranks` live until the end, and others count the processes there are."""
    items.sort(key=lambda item: "runtime" in item.path.parent.name)


@pytest.fixture(scope="session")
def ranks():
    """Six processes in one group, for all plans."""
    from haap_rl.runtime.session import Session

    others = set(multiprocessing.active_children())
    with Session(6) as session:
        yield session
    assert set(multiprocessing.active_children()) <= others
