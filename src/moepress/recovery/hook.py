"""The contract of training hooks lies above all rooms: what compresses and what trains both know it."""

from moepress.hook import TrainingHook

__all__ = ["TrainingHook"]
