"""Training that brings quality back: a compact student learns from the model it was made of."""

from moepress.recovery.hook import TrainingHook
from moepress.recovery.loop import recover
from moepress.recovery.options import RecoverOptions, RecoverReport

__all__ = ["RecoverOptions", "RecoverReport", "TrainingHook", "recover"]
