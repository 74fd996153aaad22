"""What is kept of a run: its record, always (`record.py`), and a copy for W&B when asked (`weights_and_biases.py`)."""

from haap_rl.tracking.record import recorded_plan, result_to_json, write_record

__all__ = ["recorded_plan", "result_to_json", "write_record"]
