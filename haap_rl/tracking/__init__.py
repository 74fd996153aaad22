"""What is kept of a run: its record, always (`record.py`), and a copy for W&B when asked (`weights_and_biases.py`)."""

from haap_rl.tracking.record import read_record, recorded_plan, recorded_profile, result_to_json, write_record
from haap_rl.tracking.tracker import Tracker, tracker_from_config

__all__ = [
    "Tracker",
    "read_record",
    "recorded_plan",
    "recorded_profile",
    "result_to_json",
    "tracker_from_config",
    "write_record",
]
