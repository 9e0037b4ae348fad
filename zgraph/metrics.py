"""Writers for `zgraph.Metrics`: `zgraph.metrics.JsonLines("run.jsonl")`."""

from zgraph.reporting.metrics.step_values import StepValues
from zgraph.reporting.metrics.writers import JsonLines, TensorBoard, WeightsAndBiases, Writer

__all__ = ["JsonLines", "StepValues", "TensorBoard", "WeightsAndBiases", "Writer"]
