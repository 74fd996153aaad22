"""The benchmark of environments and training runs and writes what it says; nothing here asserts on seconds."""

import json

from experiments import bench_training


def test_it_measures_both_environments_and_the_parts_of_training(tmp_path):
    assert bench_training.main([f"out={tmp_path}", "quick=true"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["steps_per_s"]) == {"haap_rl/Construct-v0", "haap_rl/Partition-v0"}
    assert all(value > 0 for value in summary["training"].values())
    assert "plans/s" in (tmp_path / "table.md").read_text()
