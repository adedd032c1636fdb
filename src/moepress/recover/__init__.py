"""Training that brings quality back: a compact student learns from the model it was made of."""

from moepress.recover.hook import TrainingHook
from moepress.recover.loop import recover
from moepress.recover.options import RecoverOptions, RecoverReport

__all__ = ["RecoverOptions", "RecoverReport", "TrainingHook", "recover"]
