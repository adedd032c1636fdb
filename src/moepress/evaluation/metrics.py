"""What answers are worth, as shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from moepress.tasks import Example, Task


def task_scores(task: Task, examples: Sequence[Example], chosen: Sequence[int]) -> dict[str, float]:
    """The metrics of a task whose answers were chosen; -1 is an answer that is none of the choices."""
    labels = [example.label for example in examples]
    known = {"accuracy": accuracy, "f1": f1_of_yes}
    return {name: known[name](labels, chosen) for name in task.metrics}


def accuracy(labels: Sequence[int], chosen: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(labels, chosen, strict=True)) / len(labels)


def f1_of_yes(labels: Sequence[int], chosen: Sequence[int]) -> float:
    """F1 of the second choice over all examples (in MultiRC: F1a)."""
    both = sum(a == b == 1 for a, b in zip(labels, chosen, strict=True))
    either = sum(a == 1 for a in labels) + sum(b == 1 for b in chosen)
    return 2 * both / either if either else 0.0


def written_scores(task: Task, references: Sequence[Sequence[str]], written: Sequence[str]) -> dict[str, float]:
    """SQuAD's exact match and F1 of words, each against the reference that suits best."""
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    known = {"exact_match": compute_exact, "f1": compute_f1}
    return {
        name: sum(max(known[name](right, text) for right in rights) for rights, text in zip(references, written))
        / len(written)
        for name in task.metrics
    }


def same_words(one: str, other: str) -> bool:
    """Whether two answers count as the same, as SQuAD compares them."""
    from transformers.data.metrics.squad_metrics import compute_exact

    return bool(compute_exact(one, other))
