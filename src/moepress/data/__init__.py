"""Text in: sources and mixtures, and the tokenised batches that models run on."""

from moepress.data.batches import CalibrationData, calibration_batches, window_batches
from moepress.data.examples import task_examples
from moepress.data.sources import Document, read_documents
from moepress.data.windows import Windows, read_windows

__all__ = [
    "CalibrationData",
    "Document",
    "Windows",
    "calibration_batches",
    "read_documents",
    "read_windows",
    "task_examples",
    "window_batches",
]
